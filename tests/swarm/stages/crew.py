"""A run in stages on loopback, by processes that a test kills and stops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarm_protocol.process.handle import ProcessHandle
from tests.swarm.network import ME, Network
from tests.swarm.waiting import DEADLINE_S, wait_for

_STEP = re.compile(r"step (\d+)(?::|$)")


@dataclass
class Process:
    """One that runs a command of ``python -m swarm_stages``."""

    handle: ProcessHandle
    log: Path

    @property
    def pid(self) -> int:
        return self.handle.pid

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
        return self.handle.is_alive

    def signal(self, number: signal.Signals) -> None:
        self.handle.signal(number)

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

    def __init__(self, run_file: Path, directory: Path, network: Network | None) -> None:
        self.run_file = run_file
        self.peers: list[StageProcess] = []
        self._directory = directory
        self._network = network
        self._forkers: dict[str, subprocess.Popen[str]] = {}  # by host
        self._num_started = 0

    def start(self, *stages: int, host: str = ME, lie: str = "") -> list[StageProcess]:
        """A peer of each; returns at once. ``lie``: one of ``LIES``, which these peers tell."""
        address = self._network.addresses[host] if self._network else "127.0.0.1"
        found = []
        for stage in stages:
            process, log = self._fork("serve", "--stage", str(stage), "--host", address, host=host, lie=lie)
            found.append(StageProcess(process, log, stage))
        self.peers += found
        return found

    def join(self, *stages: int, host: str = ME, lie: str = "") -> list[StageProcess]:
        """A peer of each; returns when all have joined."""
        started = self.start(*stages, host=host, lie=lie)
        for peer in started:
            wait_for(lambda peer=peer: peer.address or not peer.is_alive, f"a peer joins stage {peer.stage}")
            assert peer.address, peer.stderr
        return started

    def trainer(self, steps: int, *arguments: str) -> Process:
        return Process(*self._fork("trainer", "--steps", str(steps), *arguments))

    def export(self, directory: Path) -> str:
        """The line that says after which step it was."""
        process = Process(*self._fork("export", str(directory)))
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

    def _fork(self, command: str, *arguments: str, host: str = ME, lie: str = "") -> tuple[ProcessHandle, Path]:
        self._num_started += 1
        log = self._directory / f"{command}-{self._num_started}.stdout"
        joining = ["--initial-peers", *self.addresses] if self.addresses else []
        task = {
            "arguments": [command, str(self.run_file), *arguments, *joining],
            "stdout": str(log),
            "stderr": str(log.with_suffix(".stderr")),
            "lie": lie,
        }
        if host not in self._forkers:
            make = partial(_forker, self._directory / "cache")
            self._forkers[host] = make() if host == ME else self._network.run(host, make)
        forker = self._forkers[host]
        forker.stdin.write(json.dumps(task) + "\n")
        forker.stdin.flush()
        return ProcessHandle(int(forker.stdout.readline())), log

    def end(self) -> None:
        """Kills whoever still runs."""
        for forker in self._forkers.values():
            forker.kill()  # and with it, all that it has started
            forker.communicate()


def _forker(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.swarm.stages.forker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)},
    )


@contextmanager
def crew(run_file: Path, directory: Path, network: Network | None = None) -> Iterator[Crew]:
    """Nobody is there yet. Whoever still runs at the end is killed."""
    peers = Crew(run_file, directory, network)
    try:
        yield peers
    finally:
        peers.end()
