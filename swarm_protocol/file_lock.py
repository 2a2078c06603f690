"""Locks on files that one process of this machine holds at a time."""

import fcntl
from typing import IO


def try_lock(file: IO[bytes] | IO[str]) -> bool:
    """Lock an open file without waiting, and return whether it is locked now.

    The kernel unlocks it when the file is closed or the process ends. Raises OSError if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
