"""What a server under attack has in use, from outside and as ``tests.attack.attacked_server`` says itself."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from swarm_protocol.wire.constants import MIB
from tests.swarm.processes import ServerProcess
from tests.swarm.waiting import wait_for

_SLACK_BYTES = 160 * MIB  # its C library keeps up to 64 MiB for a thread that freed them
_SLACK_THREADS = 16  # executors and gRPC start theirs when they first need them, and keep them
_SLACK_FILES = 8  # connections to other servers are kept
_SLACK_TASKS = 8


@dataclass(frozen=True)
class Resources:
    """Of one process at one moment.

    Attributes:
        tasks: of asyncio, that are not done.
        arriving_bytes: of requests of which more was to come.
    """

    memory_bytes: int
    threads: int
    files: int
    sessions: int
    tasks: int
    arriving_bytes: int

    def are_back(self, before: Resources) -> bool:
        """Whether no more is in use than before, but for what is not given back so soon."""
        return (
            self.memory_bytes < before.memory_bytes + _SLACK_BYTES
            and self.threads <= before.threads + _SLACK_THREADS
            and self.files <= before.files + _SLACK_FILES
            and self.tasks <= before.tasks + _SLACK_TASKS
            and self.sessions <= before.sessions
            and self.arriving_bytes <= before.arriving_bytes
        )


def resources_of(server: ServerProcess) -> Resources:
    return Resources(
        memory_bytes=memory_bytes(server),
        threads=int(_status(server)["Threads"]),
        files=len(os.listdir(f"/proc/{server.pid}/fd")),
        **_inside(server),
    )


def memory_bytes(server: ServerProcess) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * 4096


def forget_peak(server: ServerProcess) -> None:
    """From now on, ``peak_bytes`` is counted anew."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")


def peak_bytes(server: ServerProcess) -> int:
    """The most memory that the process has had."""
    return int(_status(server)["VmHWM"].split()[0]) * 1024


def _inside(server: ServerProcess) -> dict[str, int]:
    num_lines = len(server.stdout)
    os.kill(server.pid, signal.SIGUSR1)
    wait_for(lambda: len(server.stdout) > num_lines, "the server has said what it has in use")
    inside: dict[str, int] = json.loads(server.stdout[num_lines])
    return inside


def _status(server: ServerProcess) -> dict[str, str]:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
