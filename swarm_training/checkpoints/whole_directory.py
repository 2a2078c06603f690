"""A checkpoint's directory, which appears once everything in it is on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

PREFIX = ".partial-"  # of the name of a directory that is being written, or was when its process was killed


class CannotWrite(ValueError):
    """The error of a failed write, for example to a full disk or into another user's directory. Nothing of what was
    written is left."""


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yield a new directory to write into, which is renamed to ``directory`` at the end. A failure leaves nothing.

    ``directory``: must not exist, or must be empty.

    Raises:
        CannotWrite: something in the directory cannot be written.
    """
    with refusals(directory), _partial(directory) as partial:
        yield partial
        # Before the rename: after a loss of power, a complete name must not stand for incomplete files.
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        partial.chmod(0o755)  # `mkdtemp` has let only this user in
        partial.replace(directory)
        _sync(directory.parent)


def require_writable(directory: Path) -> None:
    """Raise CannotWrite unless a file can be written beside the directory now, and moved to the directory's place."""
    if directory.is_mount():
        raise CannotWrite(f"{directory} is a mount point: expected a directory in it")
    with refusals(directory), _partial(directory) as partial:
        (partial / "file").write_bytes(b"-")


@contextmanager
def refusals(directory: Path) -> Iterator[None]:
    """Raise CannotWrite for what the operating system refuses while the context is active."""
    try:
        yield
    except (TimeoutError, BrokenPipeError):  # they come from a network, or from the reader of printed lines
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CannotWrite(f"cannot write the checkpoint {directory}: {reason}") from None


@contextmanager
def _partial(directory: Path) -> Iterator[Path]:
    """Yield a new directory on the same disk. It is removed at the end, unless it has been moved."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory.parent))
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Write a file or a directory's entries to the disk. Windows opens no directories, and writes entries by itself."""
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
