"""A process that nobody waits for, by more than its number."""

from __future__ import annotations

import os
import select
import signal
import weakref
from contextlib import suppress


class ProcessHandle:
    """Once a process has ended and been waited for, its number may be another's, or that of any thread: whoever sends a
    signal to it may end something else. A handle has a descriptor of the process itself (pidfd_open(2), of Linux).

    Attributes:
        pid: its number while it runs.
    """

    def __init__(self, pid: int) -> None:
        """``pid``: of a process that has just started; it may have ended already."""
        self.pid = pid
        self._close: weakref.finalize[[int], ProcessHandle] | None = None
        self._descriptor = -1
        with suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)
            self._close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def is_alive(self) -> bool:
        """Whether some of its threads run: what they have open is closed after that."""
        if self._close is None:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(0):
            return True
        self._close()
        self._close = None
        return False

    def signal(self, number: signal.Signals) -> None:
        """Does nothing if it has ended."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)
