"""The states that a peer can go back to: of the last few steps that are multiples of some number."""

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
    """In memory, or in a new directory of this process's own, which ``close`` removes. May be used by several threads:
    one keeps, others read."""

    def __init__(self, every: int, most: int, directory: Path | None) -> None:
        """``every``: steps; 0: none is kept. ``directory``: in which the new one is made; None: in memory.

        Raises ValueError if there can be no such directory."""
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
        """Raises OSError if it cannot be written."""
        self.keep_written(step, digest, lambda file: file.write(data))

    def keep_written(self, step: int, digest: bytes, write: Callable[[BinaryIO], object]) -> None:
        """``write``: writes all of it to a file. Raises OSError if that fails."""
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
        """By step."""
        return {step: kept.digest for step, kept in self._kept.items()}

    def read(self, digest: bytes) -> bytes | None:
        """None if there is none with this digest."""
        for kept in self._kept.values():
            if kept.digest == digest:
                try:
                    return kept.data.read_bytes() if isinstance(kept.data, Path) else kept.data
                except OSError:
                    return None
        return None

    def discard_after(self, step: int) -> None:
        """Those of steps which a rollback has undone."""
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
