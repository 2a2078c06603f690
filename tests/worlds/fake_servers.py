"""Servers that open sessions and compute nothing, behind the DHT and channels of a real client, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from swarm_client.core.config import ClientConfig
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.dht.records import ServerRecord, SwarmView
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.session_keys import push_key_of
from tests.unit.support import server_record
from tests.worlds.servers import Answering, rpc_error

NUM_BLOCKS = 6
LIMIT_S = 1000.0  # of virtual time
FULL = "no room at present"


class FakeCall:
    """The stream of one session, as the server sees it.

    Attributes:
        request: what the session was opened with; None: it has not arrived.
        steps: that have arrived.
        closed: the client has ended it politely; ``cancelled``: it has dropped it.
    """

    def __init__(self, servers: FakeServers, peer_id: str) -> None:
        self.peer_id = peer_id
        self.request: pb.Open | None = None
        self.steps: list[pb.Step] = []
        self.is_open = self.closed = self.cancelled = False
        self._servers = servers
        self._replies: asyncio.Queue[pb.SessionReply | None] = asyncio.Queue()  # None: the end

    async def write(self, request: pb.SessionRequest) -> None:
        await asyncio.sleep(0)
        if request.HasField("open"):
            self.request = pb.Open.FromString(request.open.SerializeToString())
            self._servers.calls.append(self)
        if request.HasField("step"):
            self.steps.append(request.step)
        self.closed |= request.HasField("close")

    async def read(self) -> pb.SessionReply | object:
        if not self.is_open:
            assert self.request is not None
            await self._servers.admit(self.peer_id, self.request)
            self.is_open = True
            return pb.SessionReply(opened=pb.Opened(max_step_tokens=64))
        reply = await self._replies.get()
        if self.cancelled:
            raise asyncio.CancelledError
        return grpc.aio.EOF if reply is None else reply

    def say(self, reply: pb.SessionReply) -> None:
        """The server says this to the client."""
        self._replies.put_nowait(reply)

    async def done_writing(self) -> None:
        self._replies.put_nowait(None)

    def cancel(self) -> None:
        self.cancelled = True
        self._replies.put_nowait(None)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """gRPC tells this what it may forget later; this call forgets nothing."""

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return ""


class FakeChannel:
    """What generated stubs need of a gRPC channel."""

    def __init__(self, servers: FakeServers, peer_id: str) -> None:
        self._servers, self._peer_id = servers, peer_id

    def stream_stream(self, _path: str, **_options: Any) -> Callable[[], FakeCall]:
        return lambda: FakeCall(self._servers, self._peer_id)

    def unary_unary(self, path: str, **_options: Any) -> Callable[..., Answering]:
        async def call(request: Any, timeout: float) -> Any:
            await asyncio.sleep(0.001)
            if getattr(request, "session_key", b"") in self._servers.unheard:
                await asyncio.sleep(timeout)
                raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            return self._servers.answer(path.rpartition("/")[2], request)

        return lambda request, timeout: Answering(call(request, timeout))

    def stream_unary(self, path: str, **_options: Any) -> Callable[..., Answering]:
        """For ``Reroute``: sessions here use no adapter of the client's own."""
        answered = self.unary_unary(path)
        return lambda requests, timeout: answered(next(iter(requests)), timeout)

    unary_stream = unary_unary  # the calls for weights, which nobody makes here

    async def close(self) -> None:
        pass


class FakeServers:
    """Stands for the DHT and the servers.

    Attributes:
        calls: the sessions they were asked for, in this order.
        refusals: with what a server refuses at once, by peer id.
        silent: who never answers, by peer id; ``unreachable``: sessions that cannot be asked any more, by key;
            ``unheard``: those about which nothing is answered.
        progress: of sessions, by key; ``nexts``: the push keys of those that their outputs were rerouted to.
        copy_failures: how many copies of sessions still fail.
        room: set once a server has room, by peer id; those that are not there have room.
    """

    is_alive, is_alone = True, False  # as a node of the DHT

    def __init__(self, **blocks: str) -> None:
        self.records = {name: record(name, span) for name, span in blocks.items()}
        self.calls: list[FakeCall] = []
        self.refusals: dict[str, grpc.StatusCode] = {}
        self.silent: set[str] = set()
        self.unreachable: set[bytes] = set()
        self.unheard: set[bytes] = set()
        self.progress: dict[bytes, pb.SessionProgress] = {}
        self.nexts: dict[bytes, bytes] = {}
        self.copy_failures = 0
        self.room: dict[str, asyncio.Event] = {}

    def fill(self, *names: str) -> None:
        """These have no room until ``room`` says so."""
        self.room.update({name: asyncio.Event() for name in names})

    async def admit(self, name: str, request: pb.Open) -> None:
        """As servers do: a request waits for room for as long as it says."""
        if name in self.refusals:
            raise rpc_error(self.refusals[name], "refused")
        if name in self.silent:
            await asyncio.Event().wait()
        room = self.room.get(name)
        if room is not None and not room.is_set():
            try:
                await asyncio.wait_for(room.wait(), request.wait_s)
            except TimeoutError:
                raise rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL) from None

    def answer(self, method: str, request: Any) -> Any:
        """Calls beside the streams."""
        if method == "Echo":
            return pb.EchoReply()
        if request.session_key in self.unreachable:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "gone")
        if method == "Reroute":
            self.nexts[request.session_key] = request.next.push_key
        if method == "Copy":
            if self.copy_failures:
                self.copy_failures -= 1
                raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the copy failed")
            keys = [call.request.session_key for call in self.calls if call.request is not None]
            (copy,) = [key for key in keys if push_key_of(key) == request.to.push_key]
            self.progress[copy] = self.progress[request.session_key]
        return self.progress.get(request.session_key, pb.SessionProgress())

    def asked(self) -> list[str]:
        return [call.peer_id for call in self.calls]

    async def view(self, _model: str, *_options: object) -> SwarmView:
        return SwarmView.of(self.records.values())

    async def shutdown(self) -> None:
        pass

    async def connect(self, record: ServerRecord, config: ClientConfig) -> ServerConnection:
        return ServerConnection(record, FakeChannel(self, record.peer_id), config)


def record(name: str, span: str) -> ServerRecord:
    return server_record(name, span, num_blocks=NUM_BLOCKS, cache_tokens_left=1000)


@asynccontextmanager
async def client_of(servers: FakeServers, **options: Any) -> AsyncIterator[Swarm]:
    """A client of these servers."""
    swarm = Swarm(ClientConfig(**options), "model", "revision", NUM_BLOCKS, dht=servers, connect=servers.connect)
    await swarm.connect()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield swarm
    finally:
        await swarm.close()
