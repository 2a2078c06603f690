"""The states that a peer can go back to, from the last few steps that are multiples of some number."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from swarm_protocol.atomic_file import remove_abandoned, written_atomically
from swarm_protocol.process.scratch import scratch_directory
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.moment import Moment
from swarm_training.core.record import NEW_STATE, Kept, Lineage

_NAME = re.compile(r"step-(\d{9,15})\.(\d{1,9})\.(\d{1,9})\.(\d{1,15})\.([0-9a-f]{64})\.safetensors")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """A kept checkpoint and its file.

    ``is_extra``: whether the run cannot go back to the state, which then stays only as long as it is spared.
    """

    kept: Kept
    path: Path
    is_extra: bool = False


class KeptCheckpoints:
    """A store of checkpoints, in a new directory that ``close`` removes, or in a given directory that stays. One thread
    at a time may keep checkpoints, while any number of threads read them.

    In a directory that stays, a process that is killed at any moment leaves whole files. Processes of one machine may
    share it: what they write is named after its content.
    """

    def __init__(
        self,
        every: int,
        most: int,
        directory: Path | None,
        stays: bool = False,
        digest_of: Callable[[StateFile], bytes] | None = None,
    ) -> None:
        """Keep up to ``most`` checkpoints, one every ``every`` steps (0: none). Raise ValueError if ``directory``
        cannot be created, or SwarmError if the directory for temporary files cannot.

        ``directory``: the parent of the new directory, or with ``stays`` the directory itself; None: the new directory
        is among the temporary files. ``digest_of``: returns the digest of a state, or raises ValueError; if it is
        given, files are verified before they are read."""
        self._every = every
        self._most = most
        self._parent = scratch_directory() if every and directory is None else directory
        self._directory = directory if stays else None
        self._stays = stays
        self._digest_of = digest_of
        self._kept: dict[int, _Entry] = {}  # by step, ascending; replaced, never changed, as other threads read it
        self.spared: frozenset[int] = frozenset()  # the steps of the last call of ``spare``
        if every and directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                name = "checkpoints" if stays else "checkpoint_directory"
                raise ValueError(f"{name} is {directory}: {error.strerror}") from None
            if stays:
                remove_abandoned(directory)

    @property
    def is_on(self) -> bool:
        """Return whether any checkpoints are kept."""
        return self._every > 0

    def is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def spare(self, steps: Collection[int]) -> None:
        """Let the checkpoints of these steps stay, however old they are. Those of an earlier call are no longer spared.
        Call this in the thread that keeps checkpoints."""
        if self.spared != (spared := frozenset(steps)):
            self.spared = spared
            self._replace(self._staying(self._kept))

    def of(self, step: int) -> Kept | None:
        """Return the checkpoint of this step; None if there is none."""
        entry = self._kept.get(step)
        return None if entry is None else entry.kept

    def keep(self, step: int, digest: bytes, data: StateFile, lineage: Lineage = NEW_STATE) -> None:
        """Keep a state. Raise OSError if it cannot be written."""
        self.keep_written(step, digest, data.write_to, lineage)

    def keep_written(
        self,
        step: int,
        digest: bytes,
        write: Callable[[BinaryIO], object],
        lineage: Lineage = NEW_STATE,
        *,
        is_extra: bool = False,
    ) -> None:
        """Keep a state, unless it is kept already. ``write``: writes all of the state to a file. ``is_extra``: whether
        the run cannot go back to the state, which then stays as long as it is spared. Raise OSError if writing fails.
        """
        known = self._kept.get(step)
        if known is not None and known.kept.state_digest == digest and (is_extra or not known.is_extra):
            self.mark(step, lineage.rollbacks, lineage.skipped_batches)
            return
        kept = Kept(step, digest, lineage)
        self._replace(self._staying({**self._kept, step: _Entry(kept, self._written(kept, write), is_extra)}))
        # While this process keeps fewer, older files stay: another process that shares the directory may keep them.
        if self._stays and len(self.digests()) == self._most:
            self._remove_older()

    def _staying(self, entries: Mapping[int, _Entry]) -> dict[int, _Entry]:
        """Return the newest entries and the spared ones, by step, ascending."""
        newest = self._newest(entries)
        return {step: entries[step] for step in sorted(entries) if step in self.spared or step in newest}

    def _newest(self, entries: Mapping[int, _Entry]) -> list[int]:
        return sorted(step for step, entry in entries.items() if not entry.is_extra)[-self._most :]

    def _written(self, kept: Kept, write: Callable[[BinaryIO], object]) -> Path:
        # The operating system may have removed a temporary directory that was not used for long.
        if self._directory is None or not (self._stays or self._directory.is_dir()):
            if self._parent is not None:
                self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory = Path(tempfile.mkdtemp(prefix=".rollback-", dir=self._parent))
        path = self._directory / file_name(kept)
        with written_atomically(path) as partial, partial.open("wb") as written:
            write(written)
            if self._stays:
                written.flush()
                os.fsync(written.fileno())
        return path

    def mark(self, step: int, rollbacks: int, skipped_batches: int) -> None:
        """Note that the run is at the checkpoint of this step, if it is kept, after so many rollbacks and skipped
        batches. The file's name changes too."""
        entry = self._kept.get(step)
        if entry is None:
            return
        kept = replace(entry.kept, lineage=Lineage(entry.kept.lineage.born, rollbacks, skipped_batches))
        path = entry.path
        with suppress(OSError):  # for instance, another process that shares the directory has renamed the file
            path = path.replace(path.with_name(file_name(kept)))
        self._kept = {**self._kept, step: _Entry(kept, path, entry.is_extra)}

    def adopt(self, step: int, digest: bytes) -> None:
        """Take over the checkpoints that an earlier process has left in the directory, up to the one of this step and
        digest, at which the run goes on. Later checkpoints are removed, because the run has gone back. Checkpoints that
        are neither due nor spared are removed too."""
        if not self._stays or self._directory is None:
            return
        files = stored_in(self._directory)
        found: dict[int, _Entry] = {}
        most_skipped = 0
        for path, kept in sorted(files.items(), key=lambda item: (item[1].step, item[1].lineage.skipped_batches)):
            is_start = (kept.step, kept.state_digest) == (step, digest)
            # A checkpoint with fewer skipped batches than an older one was undone by a rollback.
            if is_start or (kept.step < step and kept.lineage.skipped_batches >= most_skipped):
                most_skipped = kept.lineage.skipped_batches
                may_go_back = is_start or self.is_due(kept.step)
                if may_go_back or kept.step in self.spared:
                    found[kept.step] = _Entry(kept, path, is_extra=not may_go_back)
        self._kept = self._staying(found)
        used = {entry.path for entry in self._kept.values()}
        _remove(files.keys() - used)

    def adopt_spared(self, moment: Moment) -> None:
        """Take over the checkpoint of this moment, which is spared, if an earlier process has left it in the directory.
        The run cannot go back to it. Its file may name more rollbacks than the moment has: a rollback may have led the
        run there again."""
        if not self._stays or self._directory is None or moment.step in self._kept or moment.step not in self.spared:
            return
        for path, kept in stored_in(self._directory).items():
            if kept.step == moment.step and kept.lineage.rollbacks >= moment.rollbacks:
                self._kept = self._staying({**self._kept, kept.step: _Entry(kept, path, is_extra=True)})

    def digests(self) -> dict[int, bytes]:
        """Return the digests of the states to go back to, by step."""
        entries = self._kept
        return {step: entries[step].kept.state_digest for step in self._newest(entries)}

    def newest(self) -> Kept | None:
        """Return the newest state to go back to; None if there is none."""
        steps = self.digests()
        return self._kept[max(steps)].kept if steps else None

    def read(self, digest: bytes) -> StateFile | None:
        """Return the state with this digest; None if there is none, or it is damaged."""
        for entry in self._kept.values():
            if entry.kept.state_digest == digest:
                return self._open(entry.path, digest)
        return None

    def _open(self, path: Path, digest: bytes) -> StateFile | None:
        others = path.parent.glob(f"*.{digest.hex()}.safetensors")  # another process may have renamed the file
        for each in dict.fromkeys((path, *others)):  # a damaged file is read once, although its name is in both
            with suppress(OSError):
                data = StateFile.open(each)
                if self._digest_of is None or is_state(data, digest, self._digest_of):
                    return data
                _logger.warning("the checkpoint %s is damaged, and is not used", each)
        return None

    def discard_after(self, step: int) -> None:
        """Discard the states after ``step``, which a rollback has undone."""
        self._replace({each: entry for each, entry in self._kept.items() if each <= step})

    def close(self) -> None:
        self._kept = {}
        if self._directory is not None and not self._stays:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _replace(self, kept: dict[int, _Entry]) -> None:
        old, self._kept = self._kept, kept
        _remove({each.path for each in old.values()} - {each.path for each in kept.values()})

    def _remove_older(self) -> None:
        """Remove the files of steps before all kept ones. Earlier processes have left them."""
        assert self._directory is not None
        oldest = min(self.digests())
        files = stored_in(self._directory).items()
        _remove(path for path, kept in files if kept.step < oldest and kept.step not in self.spared)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()


def file_name(kept: Kept) -> str:
    """Return the name of a checkpoint's file, which contains its step, its lineage and its digest."""
    lineage = kept.lineage
    numbers = f"{lineage.born}.{lineage.rollbacks}.{lineage.skipped_batches}"
    return f"step-{kept.step:09d}.{numbers}.{kept.state_digest.hex()}.safetensors"


def stored_in(directory: Path) -> dict[Path, Kept]:
    """Return the checkpoints in a directory by path, as their names describe them; none if it cannot be read."""
    found = {}
    with suppress(OSError):
        for path in directory.iterdir():
            if (match := _NAME.fullmatch(path.name)) is not None:
                step, *lineage = map(int, match.groups()[:4])
                found[path] = Kept(step, bytes.fromhex(match[5]), Lineage(*lineage))
    return found


def is_state(data: StateFile, digest: bytes, digest_of: Callable[[StateFile], bytes]) -> bool:
    """Return whether ``data`` is the state with this digest. Raise OSError if it cannot be read."""
    try:
        return digest_of(data) == digest
    except ValueError:
        return False
