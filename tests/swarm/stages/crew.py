"""A run in stages on loopback, by processes that a test kills and stops."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.swarm.processes import ForkedProcess, preload
from tests.swarm.waiting import DEADLINE_S, wait_for

_LOOK_S = 1.0  # for mates at a stage where nobody can be but those who start together
preload(
    "swarm_training.stages.commands.exporting",
    "swarm_training.stages.commands.serving",
    "swarm_training.stages.commands.training",
    "tests.swarm.stages.member",
    "torch._dynamo",  # the first optimizer of a process imports it
)
_STEP = re.compile(r"step (\d+)(?::|$)")


@dataclass
class Process:
    """One that runs a command of ``python -m swarm_training.stages``."""

    process: ForkedProcess
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lines(self) -> list[str]:
        """All that it has printed so far, whole lines only."""
        return self.log.read_text().rpartition("\n")[0].splitlines() if self.log.exists() else []

    @property
    def stderr(self) -> str:
        return self.log.with_suffix(".stderr").read_text()

    @property
    def steps(self) -> list[int]:
        """Steps of the run that it has told of, in its order."""
        return [int(found[1]) for line in self.lines if (found := _STEP.match(line))]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        wait_for(lambda: not self.is_alive, f"process {self.pid} is gone")

    def reach(self, step: int, deadline_s: float = DEADLINE_S) -> None:
        """Waits until it has told of this step, or a later one."""
        try:
            wait_for(lambda: self.steps[-1:] >= [step] or not self.is_alive, f"step {step}", deadline_s)
            assert self.steps[-1:] >= [step], f"ended before step {step}"
        except AssertionError as error:
            raise AssertionError(f"{error}; it said {self.lines[-3:]} and {self.stderr[-3000:]}") from None


@dataclass
class StageProcess(Process):
    stage: int

    @property
    def address(self) -> str | None:
        """None until it has joined."""
        found = (re.search(r"--initial-peers (\S+)", line) for line in self.lines)
        return next((each[1] for each in found if each), None)

    @property
    def peer_id(self) -> str:
        assert self.address, "it has not joined yet"
        return self.address.rpartition("/")[2]


class Crew:
    """Attributes:
    peers: that are not known to have ended, in the order of their start.
    """

    def __init__(self, run_file: Path, directory: Path) -> None:
        self.run_file = run_file
        self.peers: list[StageProcess] = []
        self._directory = directory
        self._started: list[Process] = []

    def start(self, *stages: int, lie: str = "") -> list[StageProcess]:
        """A peer of each; returns at once. ``lie``: one of ``LIES``, which these peers tell."""
        is_empty = {stage: not any(peer.stage == stage for peer in self.peers) for stage in stages}
        found = []
        for stage in stages:
            how = {**({"look_s": _LOOK_S} if is_empty[stage] else {}), **({"lie": lie} if lie else {})}
            process = self._fork("serve", "--stage", str(stage), "--host", "127.0.0.1", **how)
            found.append(StageProcess(process.process, process.log, stage))
        self.peers += found
        return found

    def join(self, *stages: int, lie: str = "") -> list[StageProcess]:
        """A peer of each; returns when all have joined."""
        started = self.start(*stages, lie=lie)
        for peer in started:
            wait_for(lambda peer=peer: peer.address or not peer.is_alive, f"a peer joins stage {peer.stage}")
            assert peer.address, peer.stderr
        return started

    def trainer(self, steps: int, *arguments: str) -> Process:
        return self._fork("trainer", "--steps", str(steps), *arguments)

    def export(self, directory: Path) -> str:
        """The line that says after which step it was."""
        process = self._fork("export", str(directory))
        wait_for(lambda: not process.is_alive, "the run is exported")
        assert process.lines and "after step" in process.lines[-1], process.stderr
        return process.lines[-1]

    def at(self, stage: int) -> list[StageProcess]:
        """Who has joined it, and lives."""
        return [peer for peer in self.peers if peer.stage == stage and peer.address and peer.is_alive]

    def kill(self, *peers: StageProcess) -> None:
        """At once."""
        for peer in peers:
            peer.signal(signal.SIGKILL)
            self.peers.remove(peer)
        for peer in peers:
            wait_for(lambda peer=peer: not peer.is_alive, "a killed peer is gone")

    @property
    def addresses(self) -> list[str]:
        """By which others join now."""
        return [peer.address for peer in self.peers if peer.address and peer.is_alive][-2:]

    def _fork(self, command: str, *arguments: str, **how: object) -> Process:
        log = self._directory / f"{command}-{len(self._started) + 1}.stdout"
        joining = ["--initial-peers", *self.addresses] if self.addresses else []
        task = [json.dumps(how), command, str(self.run_file), *arguments, *joining]
        environment = {**os.environ, "XDG_CACHE_HOME": str(self._directory / "cache")}
        process = ForkedProcess("tests.swarm.stages.member", task, log.with_suffix(".stderr"), environment, log)
        self._started.append(Process(process, log))
        return self._started[-1]

    def end(self) -> None:
        """Kills whoever still runs."""
        for process in self._started:
            process.signal(signal.SIGKILL)
        for process in self._started:
            wait_for(lambda process=process: not process.is_alive, "a killed process is gone")


@contextmanager
def crew(run_file: Path, directory: Path) -> Iterator[Crew]:
    """Nobody is there yet. Whoever still runs at the end is killed."""
    peers = Crew(run_file, directory)
    try:
        yield peers
    finally:
        peers.end()
