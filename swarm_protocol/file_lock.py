"""File locks that one process of this machine holds at a time: flock(2), or the lock of a byte on Windows.

The system releases a lock when the file is closed or the process ends. All functions take an open file or its
descriptor, and raise OSError if locks are unsupported.
"""

from __future__ import annotations

import errno
import os
import time
from typing import IO, Any

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_LOCKED_BYTE = 1 << 30  # far behind any content, because on Windows nobody else can read a locked byte
_POLL_S = 0.02


def try_lock(file: IO[Any] | int, shared: bool = False) -> bool:
    """Lock an open file without waiting, and return whether this process now holds the lock.

    ``shared``: several processes may hold the lock if all of them ask so; on Windows, still only one.
    """
    if fcntl is None:
        return _try_lock_byte(file if isinstance(file, int) else file.fileno())
    try:
        fcntl.flock(file, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    return True


def lock(file: IO[Any] | int) -> None:
    """Lock an open file, and wait as long as another process holds the lock."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
        return
    while not try_lock(file):
        time.sleep(_POLL_S)


def _try_lock_byte(descriptor: int) -> bool:
    import msvcrt

    windows: Any = msvcrt  # type checkers know its functions only on Windows
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)  # the locked range begins at the file's position
    try:
        windows.locking(descriptor, windows.LK_NBLCK, 1)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EDEADLK):
            return False
        raise
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)
    return True
