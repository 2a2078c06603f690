"""File locks that one process of this machine holds at a time."""

import fcntl
from typing import IO


def try_lock(file: IO[bytes] | IO[str]) -> bool:
    """Lock an open file without waiting, and return whether this process now holds the lock.

    The kernel releases the lock when the file is closed or the process ends. Raises OSError if locks are unsupported.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
