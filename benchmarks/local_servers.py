"""Server processes on this machine, started as a user starts them: the time and memory they take is what he sees."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_protocol.errors import SwarmError

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LocalServer:
    """A server process that is ready."""

    pid: int
    ready_line: str
    start_s: float  # from the start of the process to its ready line

    @property
    def cpu_s(self) -> float:
        """Return the processor time of all threads so far, in seconds."""
        return cpu_s_of(self.pid)

    @property
    def peak_memory_bytes(self) -> int:
        """The most resident memory the process has had so far."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0


def cpu_s_of(pid: int) -> float:
    """Return the processor time of a process so far, in seconds, with that of threads that have ended."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) returns


@contextlib.contextmanager
def local_servers(
    swarm: str,
    spans: Sequence[str],
    arguments: Sequence[str] = (),
    cores: Sequence[int] | None = None,
    hosts: Sequence[tuple[Sequence[str], str]] | None = None,
    root: Path | None = None,
) -> Iterator[list[LocalServer]]:
    """One single-threaded server process per span, ready to serve; all are gone afterwards.

    With ``cores``, the server of ``spans[i]`` runs on core ``cores[i]`` alone. With ``hosts``, it runs where the words
    of ``hosts[i]`` before a command lead (see ``NetworkLab.on``), at the address beside them. ``root``: the checkout
    whose code runs, if it is not that of the working directory.

    Raises:
        SwarmError: with the server's own words, if one does not start.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory, _terminated_as_interrupt(), contextlib.ExitStack() as cleanup:
        starting = []
        signalled: set[int] = set()  # after a second one, a server would exit at once
        for number, span in enumerate(spans):
            log = cleanup.enter_context(open(Path(directory) / str(number), "w+"))
            pin = [] if cores is None else ["taskset", "--cpu-list", str(cores[number])]
            command = [*pin, sys.executable, "-m", "swarm_server", "--blocks", span, "--swarm", swarm, *arguments]
            if hosts is not None:
                words, address = hosts[number]
                command = [*words, *command, "--host", address]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=root,
            )
            cleanup.callback(_stop, process, signalled)
            starting.append((process, log))
        cleanup.callback(lambda: [_terminate(process, signalled) for process, _ in starting])
        yield _wait_until_ready(starting)


def _wait_until_ready(starting: list) -> list[LocalServer]:
    start = time.monotonic()
    lines: queue.Queue = queue.Queue()

    def read_line(number: int) -> None:
        line = starting[number][0].stdout.readline()
        lines.put((number, line, time.monotonic() - start))

    for number in range(len(starting)):
        threading.Thread(target=read_line, args=(number,), daemon=True).start()
    ready: dict[int, LocalServer] = {}
    while len(ready) < len(starting):
        try:
            number, line, start_s = lines.get(timeout=max(0.0, start + _START_TIMEOUT_S - time.monotonic()))
        except queue.Empty:
            raise SwarmError(f"a server was not ready within {_START_TIMEOUT_S:g} s") from None
        process, log = starting[number]
        if not line.startswith("ready "):
            log.seek(0)
            last_line = (log.read().strip().splitlines() or ["it said nothing"])[-1]
            raise SwarmError(f"a server did not start: {last_line.removeprefix('error: ')}")
        ready[number] = LocalServer(process.pid, line.strip(), start_s)
    return [ready[number] for number in range(len(starting))]


def _terminate(process: subprocess.Popen, signalled: set[int]) -> None:
    if process.pid not in signalled:
        signalled.add(process.pid)
        process.terminate()


def _stop(process: subprocess.Popen, signalled: set[int]) -> None:
    _terminate(process, signalled)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the program like Ctrl-C meanwhile, so that no server is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
