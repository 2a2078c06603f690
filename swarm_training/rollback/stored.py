"""The checkpoints of all stages that earlier processes of this machine have left on its disk.

``DIRECTORY/stage-1`` has the checkpoints of stage 1, written by its peers. ``DIRECTORY/stage-1/before`` has those of
the stage before, of which the same peers keep copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.record import OfferedCheckpoint
from swarm_training.rollback.kept import is_state, stored_in

_DAMAGED = "damaged-"
_logger = logging.getLogger(__name__)


def stage_directory(directory: Path, stage: int) -> Path:
    return directory / f"stage-{stage}"


def copies_directory(directory: Path, keeper: int) -> Path:
    """Return the directory for copies of the stage before, which peers of the stage ``keeper`` keep."""
    return stage_directory(directory, keeper) / "before"


class StoredCheckpoints:
    """The checkpoints on this disk that have been found intact, which other peers request by digest."""

    def __init__(self, directory: Path | None, digest_of: Callable[[StateFile], bytes]) -> None:
        """Start with none. ``directory``: None if there are none. ``digest_of``: see ``KeptCheckpoints``."""
        self.directory = directory
        self._digest_of = digest_of
        self._intact: dict[bytes, Path] = {}

    def files(self, num_stages: int) -> dict[Path, OfferedCheckpoint]:
        """Return the checkpoints on this disk, as their file names describe them, the newest of each stage first."""
        found: dict[Path, OfferedCheckpoint] = {}
        if self.directory is None:
            return found
        for stage in range(num_stages):
            after = (stage + 1) % num_stages
            for directory in (stage_directory(self.directory, stage), copies_directory(self.directory, after)):
                found |= {path: OfferedCheckpoint(stage, kept) for path, kept in stored_in(directory).items()}
        return dict(sorted(found.items(), key=lambda item: (-item[1].kept.step, item[1].stage, item[0])))

    def check(self, path: Path, digest: bytes) -> bool:
        """Return whether a file is the state with this digest. If it is another one, rename the file and warn."""
        try:
            if is_state(StateFile.open(path), digest, self._digest_of):
                self._intact[digest] = path
                return True
        except OSError as error:
            _logger.warning("the checkpoint %s cannot be read, and is not used: %s", path, error.strerror or error)
            return False
        aside = path.with_name(f"{_DAMAGED}{path.name}")
        with suppress(OSError):
            path.replace(aside)
        _logger.warning("the checkpoint %s is damaged: an older one takes its place; it is %s now", path.name, aside)
        return False

    def read(self, digest: bytes) -> StateFile | None:
        """Return the state of this digest; None if there is none."""
        path = self._intact.get(digest)
        try:
            return None if path is None else StateFile.open(path)
        except OSError:
            return None

    def forget(self) -> None:
        """Offer no checkpoints any more, because the run has started."""
        self._intact.clear()
