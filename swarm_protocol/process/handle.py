"""A handle to a process that is safer than its pid."""

from __future__ import annotations

import errno
import os
import select
import signal
import weakref
from contextlib import suppress
from typing import Any


class ProcessHandle:
    """A handle to one process: its own descriptor where there are such (pidfd_open(2), Linux), else its start time.

    The pid of an ended process may be reused, so that a signal to the pid could end another process.

    Attributes:
        pid: the process's number while it runs.
    """

    def __init__(self, pid: int) -> None:
        """Open the handle; ``pid`` is of a process that has just started, and may have ended already."""
        self.pid = pid
        self._process: _Descriptor | _StartTime | None = None
        with suppress(ProcessLookupError):
            self._process = _opened(pid)

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs; by its descriptor, until its last thread has ended and its files are closed.

        Once it has ended, its descriptor is closed.
        """
        if self._process is not None and not self._process.runs():
            self._process = None
        return self._process is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; do nothing if the process has ended."""
        process = self._process
        if process is not None and process.runs():
            with suppress(ProcessLookupError):
                process.signal(number)


def _opened(pid: int) -> _Descriptor | _StartTime:
    if hasattr(os, "pidfd_open"):
        try:
            return _Descriptor(pid)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # a kernel before 5.3; a container's filter of calls
                raise
    return _StartTime(pid)


class _Descriptor:
    """A process that is named by a descriptor, which is closed with this object."""

    def __init__(self, pid: int) -> None:
        """Open it. Raise ProcessLookupError if the process has ended."""
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)

    def runs(self) -> bool:
        poll = select.poll()  # unlike ``select.select``, it takes descriptors from 1024 on
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._descriptor, number)


class _StartTime:
    """A process that is named by its pid and its start time, which psutil compares before it sends a signal."""

    def __init__(self, pid: int) -> None:
        """Look the process up. Raise ProcessLookupError if it has ended."""
        import psutil

        self._psutil: Any = psutil
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            raise ProcessLookupError(pid) from None

    def runs(self) -> bool:
        try:
            # An ended process that its parent has not waited for still has its number.
            return bool(self._process.is_running()) and self._process.status() != self._psutil.STATUS_ZOMBIE
        except self._psutil.NoSuchProcess:
            return False

    def signal(self, number: signal.Signals) -> None:
        with suppress(self._psutil.NoSuchProcess):
            self._process.send_signal(number)
