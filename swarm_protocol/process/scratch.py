"""A process's temporary directories, removed at exit; if it is killed, the next process to start removes them."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import IO

from swarm_protocol.errors import SwarmError
from swarm_protocol.file_lock import lock, try_lock

_PREFIX, _LOCK = "swarm-lm-", ".swarm-lm-lock"
_NEW = f"{_PREFIX}new-"  # not locked yet
_MAX_PATH = 50  # libp2p's sockets in it have up to 53 more, and 103 is the longest path of a socket on macOS

_directories: dict[Path, tuple[Path, IO[str]]] = {}  # of this process, with their locks, by parent
_owner_pid = 0
_making = threading.Lock()  # of two directories for one parent, one would lose its lock, and be removed by others


def scratch_directory() -> Path:
    """Return the process's directory below TMPDIR, the same for all calls; raise SwarmError if none can be created."""
    return _directory_in(Path(tempfile.gettempdir()))


def socket_directory() -> Path:
    """Return the process's directory for Unix sockets: ``scratch_directory``, or one in ``/tmp`` if that path is long.

    Raises:
        SwarmError: the directory cannot be created.
    """
    return _directory_in(_parent_of_sockets())


def _parent_of_sockets() -> Path:
    parent = tempfile.gettempdir()
    return Path(parent if len(os.fsencode(parent)) <= _MAX_PATH else "/tmp")


def _directory_in(parent: Path) -> Path:
    global _owner_pid
    with _making:
        if _owner_pid != os.getpid():  # a forked child makes its own directories
            _directories.clear()
            _owner_pid = os.getpid()
            atexit.register(remove_scratch)
        if parent not in _directories:
            try:
                _directories[parent] = _make(parent)
            except OSError as error:
                raise SwarmError(
                    f"temporary files cannot be written: {error}; set TMPDIR to a directory for them"
                ) from None
        return _directories[parent][0]


def _make(parent: Path) -> tuple[Path, IO[str]]:
    _remove_dead_in(parent)
    named = f"{_PREFIX}{os.getpid()}-"
    can_rename = os.name == "posix"  # elsewhere a directory with an open file cannot be renamed
    new = Path(tempfile.mkdtemp(prefix=_NEW if can_rename else named, dir=parent))
    held = open(new / _LOCK, "w")  # noqa: SIM115  (held as long as the process lives: the lock ends with it)
    lock(held)
    # The name by which others look for dead directories comes last: before the lock, this one would look dead.
    return new.rename(parent / f"{named}{new.name.removeprefix(_NEW)}") if can_rename else new, held


def remove_scratch() -> None:
    """Remove the directories; call this before a process ends by ``os._exit``."""
    while _owner_pid == os.getpid() and _directories:
        directory, held = _directories.popitem()[1]
        held.close()  # Windows removes no open file
        shutil.rmtree(directory, ignore_errors=True)


def remove_dead() -> None:
    """Remove the directories of ended processes, whose locks are free."""
    for parent in {Path(tempfile.gettempdir()), _parent_of_sockets()}:
        _remove_dead_in(parent)


def _remove_dead_in(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}[0-9]*-*"):
        with contextlib.suppress(OSError):
            if hasattr(os, "getuid") and directory.stat().st_uid != os.getuid():  # Windows has a directory per user
                continue
            with open(directory / _LOCK) as held:  # a foreign directory has no such file
                if try_lock(held):
                    shutil.rmtree(directory)
