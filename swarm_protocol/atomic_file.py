"""Atomic file writes: a reader sees the whole file or no file."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ABANDONED_S = 3600.0  # a partial file of this age has lost its writer
PARTIAL_SUFFIX = ".partial"  # marks a file that is still being written, or whose writer has died


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Yield a path in the same directory to write to; the file written there replaces ``path`` at the end.

    Until then, readers of ``path`` see the old file. If anything fails, the old file stays and the new one is removed.
    Several threads and processes may write the same file: the last one wins.

    Raises:
        OSError: the new file cannot replace ``path``.
    """
    with _partial(path) as partial:
        yield partial
        partial.replace(path)


def write_new(path: Path, data: bytes) -> None:
    """Write a new file that only this user can read, completely or not at all, because the disk may be full.

    Several threads and processes may write the same file: the first one wins. Readers see the whole file or none. On a
    file system without hard links, as on memory cards, they may also see an empty file for a moment.

    Raises:
        OSError: the file cannot be written; FileExistsError if there is one already.
    """
    with _partial(path) as partial:
        with open(_created(partial), "wb") as file:
            file.write(data)
        try:
            os.link(partial, path)
        except FileExistsError:
            raise
        except OSError:  # there are no hard links
            os.close(_created(path))  # only the first writer creates the file, and only that one replaces it
            partial.replace(path)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Yield the path of a partial file in the same directory, which is removed at the end if it is still there."""
    # A random name, because processes of different containers can have equal ids and one directory.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
    try:
        yield partial
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _created(path: Path) -> int:
    """Create a file that only this user can read, and return its descriptor; raise FileExistsError if it is there."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def remove_abandoned(directory: Path) -> None:
    """Remove old partial files in this directory: their writers were killed."""
    with suppress(OSError):  # the directory has gone, or cannot be read
        for partial in directory.glob(f".*{PARTIAL_SUFFIX}"):
            with suppress(OSError):  # another process has removed it, or this user may not
                if time.time() - partial.stat().st_mtime > ABANDONED_S:
                    partial.unlink()
