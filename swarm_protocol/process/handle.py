"""A handle to a process that is safer than its pid."""

from __future__ import annotations

import os
import select
import signal
import weakref
from contextlib import suppress


class ProcessHandle:
    """A handle to one process through its own descriptor (pidfd_open(2), Linux).

    The pid of an ended process may be reused, so that a signal to the pid could end another process.

    Attributes:
        pid: the process's number while it runs.
    """

    def __init__(self, pid: int) -> None:
        """Open the handle; ``pid`` is of a process that has just started, and may have ended already."""
        self.pid = pid
        self._close: weakref.finalize[[int], ProcessHandle] | None = None
        self._descriptor = -1
        with suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)
            self._close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def is_alive(self) -> bool:
        """Return whether some of its threads run; the process's open files are closed only after all have ended."""
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
        """Send a signal; do nothing if the process has ended."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)
