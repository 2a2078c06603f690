"""A checkpoint's directory, which appears once everything in it is on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

PREFIX = ".partial-"  # of what is being written, or was when a process was killed


class CannotWrite(ValueError):
    """The disk is full, say, or belongs to somebody else. Nothing is left of what was written."""


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """One to write into, which takes the place of this one at the end; of what fails, nothing is left.

    ``directory``: must not exist, or be empty.

    Raises:
        CannotWrite: something in it cannot be written.
    """
    with refusals(directory), _partial(directory) as partial:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        partial.chmod(0o755)
        partial.replace(directory)
        _sync(directory.parent)


def require_writable(directory: Path) -> None:
    """Raises CannotWrite unless a file can be written beside the directory now, and moved to where it is."""
    if directory.is_mount():
        raise CannotWrite(f"{directory} is a mount point: expected a directory in it")
    with refusals(directory), _partial(directory) as partial:
        (partial / "file").write_bytes(b"-")


@contextmanager
def refusals(directory: Path) -> Iterator[None]:
    """What the operating system refuses meanwhile is raised as CannotWrite."""
    try:
        yield
    except TimeoutError:  # an OSError too, but of a network
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CannotWrite(f"cannot write the checkpoint {directory}: {reason}") from None


@contextmanager
def _partial(directory: Path) -> Iterator[Path]:
    """On the same disk. It goes, unless it has been moved."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory.parent))
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
