"""Local server processes that a program can start, stop and kill, for the demo and for tests of faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import Closing
from swarm_protocol.process import config_file
from swarm_protocol.process.handle import ProcessHandle
from swarm_protocol.process.scratch import scratch_directory

# One thread each, which sleeps soon after a product: the servers share the cores of one machine.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", config_file.ENVIRONMENT: config_file.NONE}
LAUNCHER = "swarm_server.node.local_cluster"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.01


@dataclass(frozen=True)
class LocalServer:
    """One server process, which may have ended."""

    process: ProcessHandle
    stdout: Path
    stderr: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ready(self) -> dict[str, str]:
        """Return the fields of the server's ready line; empty until the server has printed the line."""
        line = self.stdout.read_text() if self.stdout.exists() else ""
        if not (line.startswith("ready ") and line.endswith("\n")):
            return {}
        return dict(field.split("=", 1) for field in line.split()[1:])

    @property
    def peer_id(self) -> str:
        return self.ready["peer"].rpartition("/p2p/")[2]

    @property
    def alive(self) -> bool:
        """Return whether the process runs, or its open files and sockets are not closed yet."""
        return self.process.is_alive

    def signal(self, number: signal.Signals) -> None:
        self.process.signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait_gone(self, timeout_s: float = _STOP_TIMEOUT_S) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.alive


class LocalCluster(Closing):
    """A cluster of servers that start fast, as forks of a process that has imported everything. Its context ends them.

    Each server computes with one thread, and has only the given flags; the user's configuration file is not read.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="servers-", dir=scratch_directory())
        self._servers: list[LocalServer] = []  # those that were not seen to end
        self._num_started = 0
        self._process = self._launched({**os.environ, **_ENVIRONMENT, **(environment or {})})

    def _launched(self, environment: dict[str, str]) -> subprocess.Popen[str]:
        """Return the process that imports everything and forks servers."""
        return subprocess.Popen(
            [sys.executable, "-m", LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, *arguments: str, cores: Sequence[int] | None = None) -> LocalServer:
        """Start ``python -m swarm_server ARGUMENTS`` and return at once; see ``wait_ready``."""
        self._servers = [server for server in self._servers if server.alive]
        self._num_started += 1
        place = Path(self._directory.name) / str(self._num_started)
        job: dict[str, Any] = {
            "arguments": list(arguments),
            "stdout": f"{place}.out",
            "stderr": f"{place}.err",
            "cores": None if cores is None else list(cores),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SwarmError("the process that starts servers has ended")
        server = LocalServer(ProcessHandle(int(line)), Path(job["stdout"]), Path(job["stderr"]))
        self._servers.append(server)
        return server

    def wait_ready(self, servers: Sequence[LocalServer], timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until the servers are ready. Raise SwarmError with a server's last message if it ends or is too slow."""
        deadline = time.monotonic() + timeout_s
        for server in servers:
            while not server.ready:
                if not server.alive or time.monotonic() > deadline:
                    words = server.stderr.read_text().strip().splitlines() if server.stderr.exists() else []
                    last = (words or ["it said nothing"])[-1]
                    raise SwarmError(f"a server did not start: {last.removeprefix('error: ')}")
                time.sleep(_POLL_S)

    def close(self) -> None:
        """End all servers. Kill those that do not end after a signal."""
        alive = [server for server in self._servers if server.alive]
        for server in alive:
            server.signal(signal.SIGCONT)  # a server that a test has stopped gets SIGTERM only once it goes on
            server.signal(signal.SIGTERM)
        for server in alive:
            if not server.wait_gone(_STOP_TIMEOUT_S):
                server.kill()
                server.wait_gone()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # at the end of its input, the process ends
        self._process.wait()
        self._process.stdout.close()
        self._directory.cleanup()
