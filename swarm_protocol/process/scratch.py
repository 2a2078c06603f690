"""A process's temporary directory, removed at exit; if the process is killed, the next process to start removes it."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from swarm_protocol.errors import SwarmError
from swarm_protocol.file_lock import lock, try_lock

_PREFIX, _LOCK = "swarm-lm-", ".swarm-lm-lock"
_NEW = f"{_PREFIX}new-"  # not locked yet
_MAX_PATH = 50  # libp2p's sockets in it have up to 53 more, and 103 is the longest path of a socket on macOS

_directory: Path | None = None
_lock: IO[str] | None = None
_owner_pid = 0


def scratch_directory() -> Path:
    """Return the process's directory, the same for all calls; raise SwarmError if it cannot be created."""
    global _directory, _lock, _owner_pid
    if _directory is None or _owner_pid != os.getpid():  # a forked child makes its own directory
        try:
            _directory, _lock = _make()
        except OSError as error:
            raise SwarmError(
                f"temporary files cannot be written: {error}; set TMPDIR to a directory for them"
            ) from None
        _owner_pid = os.getpid()
        atexit.register(remove_scratch)
    return _directory


def _parent() -> Path:
    parent = tempfile.gettempdir()
    return Path(parent if len(os.fsencode(parent)) <= _MAX_PATH else "/tmp")


def _make() -> tuple[Path, IO[str]]:
    parent = _parent()
    remove_dead(parent)
    named = f"{_PREFIX}{os.getpid()}-"
    can_rename = os.name == "posix"  # elsewhere no directory in which a file is open
    new = Path(tempfile.mkdtemp(prefix=_NEW if can_rename else named, dir=parent))
    held = open(new / _LOCK, "w")  # noqa: SIM115  (held as long as the process lives: the lock ends with it)
    lock(held)
    return new.rename(parent / f"{named}{new.name.removeprefix(_NEW)}") if can_rename else new, held


def remove_scratch() -> None:
    """Remove the directory; call this before a process ends by ``os._exit``."""
    global _directory
    if _directory is not None and _owner_pid == os.getpid():
        if _lock is not None:
            _lock.close()  # Windows removes no open file
        shutil.rmtree(_directory, ignore_errors=True)
        _directory = None


def remove_dead(parent: Path | None = None) -> None:
    """Remove the directories of ended processes, whose locks are free."""
    parent = parent or _parent()
    for directory in parent.glob(f"{_PREFIX}[0-9]*-*"):
        with contextlib.suppress(OSError):
            if hasattr(os, "getuid") and directory.stat().st_uid != os.getuid():  # Windows has a directory per user
                continue
            with open(directory / _LOCK) as held:  # a foreign directory has no such file
                if try_lock(held):
                    shutil.rmtree(directory)
