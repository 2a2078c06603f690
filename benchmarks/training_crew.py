"""Processes that train or average together on loopback, for ``train_together.py``."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 120.0  # until a process has joined
HERE = Path(__file__).parent
Event = dict[str, Any]


class Silent(Exception):
    """A process has not said what was waited for, or has ended before."""


class Member:
    """One process.

    Attributes:
        events: all that it has said so far and somebody has waited for, or past which somebody has waited.
    """

    def __init__(self, script: str, on: Sequence[str] = (), **task: Any) -> None:
        """Start the process. ``on``: the words before its command, such as those of a host in a lab."""
        self.number: int = task["number"]
        self.events: list[Event] = []
        self._process = subprocess.Popen(
            [*on, sys.executable, str(HERE / script), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "CRITICAL"},
            start_new_session=True,
        )
        self._said: queue.Queue[Event | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def order(self, do: str, **details: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
        self._process.stdin.flush()

    def next(self, event: str, timeout_s: float) -> Event:
        """The next one of that kind that nobody has waited for.

        Raises Silent.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                said = self._said.get(timeout=max(deadline_s - time.monotonic(), 0))
            except queue.Empty:
                raise Silent(f"member {self.number} has not said {event!r} within {timeout_s:g} s") from None
            if said is None:
                self._said.put(None)
                raise Silent(f"member {self.number} has ended before it said {event!r}")
            self.events.append(said)
            if said["event"] == event:
                return said

    def joined(self) -> Event:
        for said in self.events:
            if said["event"] == "joined":
                return said
        return self.next("joined", START_S)

    def reach(self, step: int, timeout_s: float) -> Event:
        """What it has said at that global step, or at a later one if it has skipped that. Raises Silent."""
        for said in self.events:
            if said["event"] == "step" and said["step"] >= step:
                return said
        deadline_s = time.monotonic() + timeout_s
        while (said := self.next("step", deadline_s - time.monotonic()))["step"] < step:
            pass
        return said

    def steps(self) -> dict[int, Event]:
        return {said["step"]: said for said in self.events if said["event"] == "step"}

    def catch_up(self) -> None:
        """Takes note of what it has said meanwhile."""
        with suppress(queue.Empty):
            while (said := self._said.get_nowait()) is not None:
                self.events.append(said)
            self._said.put(None)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """With the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
        self._said.put(None)


@contextmanager
def crew(script: str, tasks: Sequence[dict[str, Any]], **common: Any) -> Iterator[list[Member]]:
    """The first founds, the others join it; all are there. Whoever is in the list at the end is killed."""
    members = [Member(script, **{"number": 0, **common, **tasks[0]})]
    try:
        peers = members[0].joined()["peers"]
        for number, task in enumerate(tasks[1:], 1):
            members.append(Member(script, **{"number": number, "peers": peers, **common, **task}))
        for member in members:
            member.joined()
        yield members
    finally:
        for member in members:
            member.kill()
