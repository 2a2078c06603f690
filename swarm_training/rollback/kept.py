"""The states that a peer can go back to, from the last few steps that are multiples of some number."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class _Kept:
    digest: bytes
    data: bytes | Path


class KeptCheckpoints:
    """A store of checkpoints in memory, or in a new directory of this process, which ``close`` removes. One thread may
    keep checkpoints while other threads read them."""

    def __init__(self, every: int, most: int, directory: Path | None) -> None:
        """Keep up to ``most`` checkpoints, one every ``every`` steps (0: none). ``directory``: the parent of the new
        directory; None: in memory.

        Raises ValueError if ``directory`` cannot be created."""
        self._every = every
        self._most = most
        self._parent = directory
        self._directory: Path | None = None
        self._kept: dict[int, _Kept] = {}  # by step, ascending; replaced, never changed
        if every and directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"checkpoint_directory is {directory}: {error.strerror}") from None

    def is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def keep(self, step: int, digest: bytes, data: bytes) -> None:
        """Keep a state. Raises OSError if it cannot be written."""
        self.keep_written(step, digest, lambda file: file.write(data))

    def keep_written(self, step: int, digest: bytes, write: Callable[[BinaryIO], object]) -> None:
        """Keep a state. ``write``: writes all of the state to a file. Raises OSError if that fails."""
        kept: bytes | Path
        if self._parent is None:
            file = io.BytesIO()
            write(file)
            kept = file.getvalue()
        else:
            if self._directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix=".rollback-", dir=self._parent))
            kept = self._directory / f"{step}-{digest.hex()[:16]}.safetensors"
            try:
                with kept.open("wb") as written:
                    write(written)
            except OSError:
                kept.unlink(missing_ok=True)
                raise
        newest = sorted({**self._kept, step: _Kept(digest, kept)}.items())[-self._most :]
        self._replace(dict(newest))

    def digests(self) -> dict[int, bytes]:
        """Return the digests of the kept states, by step."""
        return {step: kept.digest for step, kept in self._kept.items()}

    def read(self, digest: bytes) -> bytes | None:
        """Return the state with this digest; None if there is none."""
        for kept in self._kept.values():
            if kept.digest == digest:
                try:
                    return kept.data.read_bytes() if isinstance(kept.data, Path) else kept.data
                except OSError:
                    return None
        return None

    def discard_after(self, step: int) -> None:
        """Discard the states after ``step``, which a rollback has undone."""
        self._replace({each: kept for each, kept in self._kept.items() if each <= step})

    def close(self) -> None:
        self._kept = {}
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _replace(self, kept: dict[int, _Kept]) -> None:
        old, self._kept = self._kept, kept
        still = {each.data for each in kept.values() if isinstance(each.data, Path)}
        for each in old.values():
            if isinstance(each.data, Path) and each.data not in still:
                each.data.unlink(missing_ok=True)
