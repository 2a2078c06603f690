"""Real servers on loopback: inside the process of the test, or as processes of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from swarm_client import background
from swarm_protocol.dht import Dht
from swarm_protocol.identity import Identity, pinned_channel
from swarm_protocol.notes import Notes
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksStub
from swarm_protocol.records import ServerRecord
from swarm_protocol.span import Span
from swarm_protocol.wire import CLIENT_OPTIONS
from swarm_server.config import ServerConfig
from swarm_server.server import Server

T = TypeVar("T")
DEADLINE_S = 120.0  # for anything that must happen; the machine may be busy
POLL_S = 0.02
_numbers = itertools.count()


def wait_for(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The condition's first true value; fails the test if there is none in time."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not happen within {deadline_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


class InProcessServers:
    """Servers of one private swarm on the event loop of this process (grpc.aio wants all its traffic on one loop).

    Each has its own DHT node, libp2p daemon and gRPC port; blocks are not quantised unless a test asks for it.
    """

    def __init__(self, model: Path, cache_tokens: int = 2048) -> None:
        self.model = model
        self.cache_tokens = cache_tokens
        self.swarm = f"test-{os.getpid()}-{next(_numbers)}"
        self._running: dict[Server, concurrent.futures.Future] = {}
        self._dht: Dht | None = None

    def start(self, *spans: str, **options: Any) -> list[Server]:
        """One more server for each span of blocks; they start at once, and are ready to serve when this returns."""
        defaults = {"model": str(self.model), "quant": "none", "throughput": 100.0, "cache_tokens": self.cache_tokens}
        configs = [
            ServerConfig(**{**defaults, "blocks": Span.parse(blocks), "swarm": self.swarm, **options})
            for blocks in spans
        ]
        servers = [Server(config) for config in configs]
        running = {server: background.submit(server.run()) for server in servers}
        self._running |= running
        wait_for(
            lambda: all(server.ready or future.done() for server, future in running.items()),
            f"servers of blocks {', '.join(spans)} are ready",
        )
        for server, future in running.items():
            if future.done():
                del self._running[server]
                future.result()
        return servers

    def stop(self, server: Server) -> None:
        """Ends the server as SIGTERM would."""
        future = self._running.pop(server)
        background.run(_call(server.stop))
        future.result(DEADLINE_S)

    @property
    def initial_peers(self) -> list[str]:
        return Notes(self.swarm).read()

    def records(self) -> list[ServerRecord]:
        """What the DHT says about the servers, first blocks first."""
        if self._dht is None:
            self._dht = background.run(Dht.join(self.swarm, self.initial_peers, Identity.generate()))
        return list(background.run(self._dht.view(self.model.name)).servers)

    def describe(self) -> list[ServerRecord]:
        """The records of the servers in this process as they are now, asked of the servers themselves."""
        ours = {peer.rpartition("/p2p/")[2] for peer in self.initial_peers}
        records = []
        for record in self.records():
            if record.peer_id in ours:
                with RawClient(record) as client:
                    records.append(client.describe())
        return records

    def wait_until_all_room_is_free(self) -> None:
        wait_for(
            lambda: all(record.cache_tokens_left == self.cache_tokens for record in self.describe()),
            "all room for keys and values has come back",
        )

    def close(self) -> None:
        for server in list(self._running):
            self.stop(server)
        if self._dht is not None:
            background.run(self._dht.shutdown())

    def __enter__(self) -> InProcessServers:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


async def _call(function: Callable[[], T]) -> T:
    return function()


class RawClient:
    """Sends hand-made messages to one server."""

    def __init__(self, record: ServerRecord) -> None:
        self.record = record
        self._channel = background.run(pinned_channel(record.addresses[0], record.tls_fingerprint, CLIENT_OPTIONS))
        self._stub = BlocksStub(self._channel)

    def describe(self) -> ServerRecord:
        """The server's record as it is now."""
        return ServerRecord.from_proto(background.run(_unary(self._stub.Describe, pb.DescribeRequest())))

    def forward(self, *requests: pb.ForwardRequest) -> Answer:
        return background.run(_talk(self._stub.Forward, requests))

    def backward(self, *requests: pb.BackwardRequest) -> Answer:
        return background.run(_talk(self._stub.Backward, requests))

    def session(self, *requests: pb.SessionRequest) -> Answer:
        """Sends all requests, then reads until the server ends the stream."""
        return background.run(_talk(self._stub.Session, requests))

    @contextmanager
    def open_session(self, request: pb.SessionRequest) -> Iterator[None]:
        """Keeps a session open meanwhile; it ends without a goodbye."""
        call = background.run(_opened(self._stub.Session, request))
        try:
            yield
        finally:
            background.run(_call(call.cancel))

    def close(self) -> None:
        background.run(self._channel.close())

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class Answer:
    """What a server answered to a stream of requests, and the status that ended it."""

    def __init__(self, replies: list, status: grpc.StatusCode, details: str) -> None:
        self.replies, self.status, self.details = replies, status, details

    def __repr__(self) -> str:
        return f"Answer({len(self.replies)} replies, {self.status.name}: {self.details})"


async def _unary(method: Callable, request: Any) -> Any:
    return await method(request, timeout=DEADLINE_S)


async def _opened(method: Callable, request: Any) -> Any:
    """An open stream whose first request has been answered."""
    call = method(timeout=DEADLINE_S)
    await call.write(request)
    assert await call.read() is not grpc.aio.EOF, await call.details()
    return call


async def _talk(method: Callable, requests: tuple) -> Answer:
    """Keeps the stream open after the last request: a server that waits for more would hang the test, not pass it."""
    call = method(timeout=DEADLINE_S)
    replies = []

    async def read() -> None:
        async for reply in call:
            replies.append(reply)

    reading = asyncio.ensure_future(read())
    try:
        for request in requests:
            await call.write(request)
        await reading
    except (grpc.RpcError, asyncio.InvalidStateError):
        await asyncio.wait([reading])
        reading.exception()
    return Answer(replies, await call.code(), await call.details())


class ServerProcess:
    """``python -m swarm_server`` as a process of its own; a context manager.

    Attributes:
        ready: the fields of its ready line.
        stdout: the lines it has printed so far; complete once it has ended.
    """

    def __init__(self, *arguments: str, cache: Path, wait: bool = True) -> None:
        self._log = cache / f"server-{next(_numbers)}.log"
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "swarm_server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
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

    def children(self) -> list[int]:
        """The processes this server has started: its libp2p daemon."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == self.pid]

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
    seconds: float
    left_behind: list[str]
    stdout: str
    stderr: str

    def assert_one_sentence(self, pattern: str) -> None:
        """The command failed, said why in one sentence without traceback, and left no process."""
        lines = [line for line in self.stderr.splitlines() if line.strip() and not line.startswith("loading blocks:")]
        assert self.code == 1, self
        assert self.stdout.strip() == ""
        assert len([line for line in lines if line.startswith("error: ")]) == 1, self.stderr
        assert re.search(pattern, lines[-1]), self.stderr
        assert "Traceback" not in self.stderr
        assert self.left_behind == []


def run_commands(package: str, commands: list[list[str]], cache: Path) -> list[Outcome]:
    """Runs command lines of ``python -m package``, several at once."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.swarm.forked_commands", package],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
        timeout=2 * DEADLINE_S,
    )
    assert result.returncode == 0, result.stderr
    return [Outcome(**fields) for fields in json.loads(result.stdout)]


class Numbers:
    """Enough of a tokenizer for a streamer: a token's text is its number."""

    def decode(self, ids: Iterable[int], **_options: Any) -> str:
        return "".join(f" {int(token)}" for token in ids)


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def _parent_of(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
