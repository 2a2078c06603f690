"""Commands that run as child processes of this one, and end together with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import Closing, undone_on_error
from swarm_protocol.process.logs import ERASE_LINE, FOREGROUND, is_in_foreground, shows_progress
from swarm_protocol.process.signals import end_with_parent, exit_in_words

T = TypeVar("T")
_POLL_S = 0.1
_LAST_LINES_S = 1.0  # for log lines that an ended child has written


class ChildProcess:
    """A command of ours that this process has started. The command ends if this process is killed.

    Ctrl-C does not reach the command, which is a process group of its own: the supervisor ends its children in order.

    Attributes:
        name: the name for messages, such as "server".
    """

    def __init__(self, name: str, command: Sequence[str], leave_s: float, *, is_relayed: bool = False) -> None:
        """Start the command, which may take ``leave_s`` seconds to end.

        ``is_relayed``: on a terminal, this process writes its log lines, in place of a live line that another child
        shows there.
        """
        self.name = name
        self._leave_s = leave_s
        self._printed: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if is_relayed and shows_progress() else None,
            text=True,
            errors="replace",
            **_own_group(),
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._relay)]
        for reader in self._readers:
            reader.start()

    def line(self, beginning: str) -> str:
        """Return the first line of its stdout that begins so; empty until there is one."""
        return next((line for line in self._printed if line.startswith(beginning)), "")

    @property
    def code(self) -> int | None:
        """Return its exit code, which is negative after a signal that killed it, or None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Ask it to end and wait until it has; kill it if that takes too long."""
        self._process.terminate()
        try:
            self._process.wait(self._leave_s)
        except subprocess.TimeoutExpired:
            self.kill()
        for reader in self._readers:
            reader.join(_LAST_LINES_S)
        if shows_progress() and is_in_foreground():
            sys.stderr.write(ERASE_LINE)  # a live line that it has left, if it was killed

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._printed.append(line.rstrip("\n"))

    def _relay(self) -> None:
        for line in self._process.stderr or ():
            with suppress(OSError):  # the terminal has been closed
                sys.stderr.write(f"{ERASE_LINE}{line}")
                sys.stderr.flush()


class Supervisor(Closing):
    """A context whose child processes end with it, the youngest first. A second Ctrl-C meanwhile kills them."""

    def __init__(self) -> None:
        self._children: list[ChildProcess] = []

    def add(self, child: ChildProcess) -> ChildProcess:
        self._children.append(child)
        return child

    def wait_for(self, find: Callable[[], T | None], poll_s: float = _POLL_S) -> T:
        """Return the first result that is neither None nor empty. Raise SwarmError if a child ends before."""
        while not (found := find()):
            for child in self._children:
                if child.code is not None:
                    raise SwarmError(self._obituary(child, child.code))
            time.sleep(poll_s)
        return found

    def _obituary(self, ended: ChildProcess, code: int) -> str:
        others = [f"the {child.name}" for child in self._children if child is not ended]
        too = f"; {' and '.join(others)} had to end, too" if others else ""
        return f"the {ended.name} {exit_in_words(code)}{too}"

    def close(self) -> None:
        """End all children, the last one first. Another signal kills them."""
        with undone_on_error(self._kill):
            for child in reversed(self._children):
                child.end()

    def _kill(self) -> None:
        for child in self._children:
            child.kill()


def _own_group() -> dict[str, Any]:
    """Return the options of a child process that Ctrl-C does not reach."""
    if os.name != "posix":
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    parent_pid = os.getpid()
    return {
        "env": {**os.environ, FOREGROUND: str(os.getpgrp())},
        "process_group": 0,
        "preexec_fn": lambda: _begin(parent_pid),
    }


def _begin(parent_pid: int) -> None:
    """Prepare a child process before it becomes the command."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may write to the terminal, though it is not in the foreground
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent_pid:  # the parent has ended before that
        os._exit(1)
