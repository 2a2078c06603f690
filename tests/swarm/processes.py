"""Commands as a user runs them: servers as processes of their own, and command lines that fail."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import queue
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from swarm_cli.demo.local_cluster import LAUNCHER, LocalCluster
from swarm_protocol.process.scratch import remove_scratch
from tests.swarm.network import enter
from tests.swarm.waiting import DEADLINE_S, wait_for

_numbers = itertools.count()


# What servers and other commands import, in the process that is forked.
HEAVY = [
    "tests.swarm.processes",
    "swarm_server.node.server",
    "swarm_server.command_line",
    "swarm_client.generation.generation",
    "swarm_client.model.model",
    "swarm_cli.finetune.trainer",
    "swarm_cli.finetune.training_data",
    "hivemind.dht.node",
    "uvloop",
    "datasets",
    "matplotlib.figure",
    "transformers.models.llama.modeling_llama",
]
AT_ONCE = 4  # commands of ``run_commands``
COMMAND_DEADLINE_S = 480.0
POLL_S = 0.01
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(HEAVY)


def preload(*modules: str) -> None:
    """Have the process that is forked import these modules too, unless it runs already."""
    HEAVY.extend(modules)
    _forking.set_forkserver_preload(HEAVY)


class ForkedProcess:
    """A module run as ``python -m`` would, or a script, in a fork that is a session of its own; it has those methods of
    ``subprocess.Popen`` that are used here.

    Attributes:
        stdin: what it reads.
        stdout: what it prints, line by line.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path | None,
        environment: Mapping[str, str],
        output: Path | None = None,
    ) -> None:
        """``log``: of what it says on stderr, which otherwise is that of this process. ``output``: a file for what it
        prints, in place of ``stdout``."""
        stdin, told = _forking.Pipe(duplex=False)
        said, stdout = _forking.Pipe(duplex=False)
        files = {1: output, 2: log}
        target = (module, tuple(arguments), stdin, stdout, files, dict(environment), os.getcwd())
        if log is not None:
            log.touch()  # so that it can be read at once
        with open("/proc/thread-self/ns/net") as network:
            self._process = _forking.Process(target=_become, args=(_Descriptor(network.fileno()), *target))
            self._process.start()
        self.stdin = os.fdopen(os.dup(told.fileno()), "w")
        self.stdout = os.fdopen(os.dup(said.fileno()))
        for end in (stdin, told, said, stdout):
            end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        self.stdin.close()
        return code


def lone_client(task: Sequence[Any], environment: Mapping[str, str]) -> ForkedProcess:
    """A client in a process of its own; its task is that of ``tests.swarm.lone_client``."""
    return ForkedProcess("tests.swarm.lone_client", [json.dumps(task)], None, environment)


class ForkedCluster(LocalCluster):
    """A local cluster whose launcher is forked too, and so need not import anything."""

    def _launched(self, environment: dict[str, str]) -> Any:
        return ForkedProcess(LAUNCHER, [], None, environment)


class _Descriptor:
    """A file descriptor, which a process that is started gets as an open one."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._number),)


def _received(descriptor: Any) -> int:
    return descriptor.detach()


def _become(
    network: int,
    module: str,
    arguments: Sequence[str],
    stdin: Connection,
    stdout: Connection,
    files: Mapping[int, Path | None],
    environment: Mapping[str, str],
    directory: str,
) -> None:
    """Run the module in this process, which has just been forked, in the network of the thread that has asked."""
    if not os.path.samestat(os.fstat(network), os.stat("/proc/self/ns/net")):
        enter(network)
    os.close(network)
    os.setsid()  # whatever it starts can be told by its session
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    for descriptor, path in files.items():
        if path is not None:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    for end in (stdin, stdout):
        end.close()
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another one there
    sys.argv = [module, *arguments]
    try:
        if module.endswith(".py"):
            sys.path.insert(0, str(Path(module).parent))
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        remove_scratch()  # the end of a fork is not that of an interpreter


def _start(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
        )


class ServerProcess:
    """``python -m swarm_server``, or another module that starts a server, as a process of its own; a context manager.

    It is a fork of a process that has imported everything, unless ``is_fresh``.

    Attributes:
        ready: the fields of its ready line.
        stdout: the lines it has printed so far; complete once it has ended.
    """

    def __init__(
        self, *arguments: str, cache: Path, wait: bool = True, module: str = "swarm_server", is_fresh: bool = False
    ) -> None:
        self._log = cache / f"server-{next(_numbers)}.log"
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
        start = _start if is_fresh else ForkedProcess
        self._process = start(module, arguments, self._log, environment)
        self.stdout: list[str] = []
        self.ready: dict[str, str] = {}
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.wait_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> None:
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            self.kill()
            raise AssertionError(f"the server was not ready within {deadline_s:g} s: {self.stderr}") from None
        if line is None or not line.startswith("ready "):
            self.kill()
            raise AssertionError(f"the server said {line!r} instead of that it is ready: {self.stderr}")
        self.ready = dict(field.split("=", 1) for field in line.split()[1:])

    def end(self, number: signal.Signals) -> int:
        """Sends the signal and returns the exit code; the server's children are gone as well."""
        children = self.children()
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            code = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"the server did not end after {number.name}: {self.stderr}") from None
        self._reader.join()
        self._process.stdout.close()
        wait_for(lambda: not any(map(is_alive, children)), f"the children {children} of the server are gone")
        return code

    def terminate(self) -> int:
        return self.end(signal.SIGTERM)

    def interrupt(self) -> int:
        return self.end(signal.SIGINT)

    def kill(self) -> int:
        return self.end(signal.SIGKILL)

    def freeze(self) -> None:
        """As a debugger or a machine without memory would; ``end`` with SIGTERM does not work before ``resume``."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Wakes the server, if it has not ended."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)

    def children(self) -> list[int]:
        """The processes this server has started: its libp2p daemon."""
        return [pid for pid in all_processes() if parent_of(pid) == self.pid]

    def _read(self) -> None:
        for line in self._process.stdout:
            self.stdout.append(line.rstrip("\n"))
            self._lines.put(self.stdout[-1])
        self._lines.put(None)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process.poll() is None:
            self.terminate()


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    left_behind: list[str]
    stdout: str
    stderr: str

    def assert_one_sentence(self, pattern: str, code: int) -> None:
        """The command failed, said why in one sentence without traceback, and left no process."""
        lines = [line for line in self.stderr.splitlines() if line.strip() and not line.startswith("loading blocks:")]
        assert self.code == code, self
        assert self.stdout.strip() == ""
        assert len([line for line in lines if line.startswith("error: ")]) == 1, self.stderr
        assert re.search(pattern, lines[-1]), self.stderr
        assert "Traceback" not in self.stderr
        assert self.left_behind == []


def run_commands(package: str, commands: list[list[str]], cache: Path) -> list[Outcome]:
    """Runs command lines of ``python -m package``, or of ``python script.py``, several at once."""
    waiting, outcomes = list(enumerate(commands)), dict[int, Outcome]()
    running: dict[int, tuple[ForkedProcess, float]] = {}  # by the command's number, with the end of its time
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        files = [(Path(name, f"{number}.out"), Path(name, f"{number}.err")) for number in range(len(commands))]
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, arguments = waiting.pop(0)
                output, log = files[number]
                process = ForkedProcess(package, arguments, log, environment, output)
                process.stdin.close()
                running[number] = process, time.monotonic() + COMMAND_DEADLINE_S
            for number, (process, end_s) in list(running.items()):
                if time.monotonic() > end_s:
                    process.kill()
                if (code := process.poll()) is not None:
                    del running[number]
                    process.stdout.close()
                    outcomes[number] = Outcome(
                        code, left_behind(process.pid), *(each.read_text() for each in files[number])
                    )
            time.sleep(POLL_S)
    return [outcomes[number] for number in range(len(commands))]


def left_behind(session: int) -> list[str]:
    """Names of the session's processes that are still there after a while."""
    deadline = time.monotonic() + DEADLINE_S
    while (names := _members(session)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return names


def _members(session: int) -> list[str]:
    """Names of the session's processes that live."""
    names = []
    for pid in all_processes():
        with suppress(OSError):  # it has ended just now
            if os.getsid(pid) == session and is_alive(pid):
                names.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return names


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def parent_of(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
