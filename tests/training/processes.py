"""Starts volunteers as processes, and waits for what they say."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.swarm.processes import ForkedProcess, preload

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
Event = dict[str, Any]
preload("swarm_training.run.training_run", "tests.training.volunteer", "torch._dynamo")  # which optimizers import


class Volunteer:
    """Attributes:
    events: all that it has said so far.
    """

    def __init__(self, *, program: str = "tests.training.volunteer", **task: Any) -> None:
        self.number = task.get("number", 0)
        self.events: list[Event] = []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = ForkedProcess(program, [json.dumps(task)], None, environment)
        self.pid = self._process.pid
        self._said: queue.Queue[Event | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, event: str, **facts: Any) -> Event:
        """The first such event, past or to come. Raises AssertionError if the process ends before it."""
        for said in self.events:
            if _matches(said, event, facts):
                return said
        while True:
            said = self._said.get(timeout=TIMEOUT_S)
            assert said is not None, f"volunteer {self.number} has ended before {event} {facts}: {self.events}"
            self.events.append(said)
            if _matches(said, event, facts):
                return said

    def go(self) -> None:
        self.tell("go")

    def tell(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def finish(self) -> None:
        """Has it leave the run, and waits for its end."""
        self.wait_for("done")
        self.leave()
        self.require_ended()

    def leave(self) -> None:
        self.tell("leave")

    def require_ended(self) -> None:
        """Waits for its end, which was no failure."""
        while self._said.get(timeout=TIMEOUT_S) is not None:
            pass
        assert self._process.wait(TIMEOUT_S) == 0

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self._process.wait(TIMEOUT_S)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def steps(self) -> dict[int, Event]:
        return {said["step"]: said for said in self.events if said["event"] == "step"}

    def _read(self) -> None:
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)


def _matches(said: Event, event: str, facts: dict[str, Any]) -> bool:
    return said["event"] == event and all(said[key] == value for key, value in facts.items())


@contextmanager
def volunteers(tasks: list[dict[str, Any]], **common: Any) -> Iterator[list[Volunteer]]:
    """The first founds the run, the others join it; all have heard of each other, and wait for ``go``."""
    started = [Volunteer(number=0, **{**common, **tasks[0]})]
    try:
        peers = started[0].wait_for("joined")["peers"]
        for number, task in enumerate(tasks[1:], 1):
            started.append(Volunteer(number=number, peers=peers, **{**common, **task}))
        for volunteer in started:
            volunteer.wait_for("joined")
        for volunteer in started:
            volunteer.tell(f"meet {len(started)}")
        for volunteer in started:
            volunteer.wait_for("met")
        yield started
    finally:
        for volunteer in started:
            volunteer.kill()
