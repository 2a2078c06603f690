"""A swarm in one event loop with its own clock: real client and server code over a network that fails on command.

Only what touches the outside is replaced: gRPC channels, the DHT, the compute thread, and the blocks, which are a
formula of everything a row has seen, so that a lost, doubled or misplaced position shows in every later output.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import mul
from typing import Any

import grpc
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.access.tokens import Role
from swarm_protocol.dht.records import ServerRecord, SwarmView
from swarm_protocol.errors import PeerUnavailable, RequestRejected
from swarm_protocol.net.shares import Caller
from swarm_protocol.span import Span
from swarm_server.core.counters import Counters
from swarm_server.engine.session_state import Crop, HistoryChange, NextPositions, RecordPast, Reorder, SessionStep
from swarm_server.kv.kv_cache import CacheBudget, Lease
from swarm_server.kv.kv_transfer import Stored
from swarm_server.net.arrivals import Arrivals
from swarm_server.net.neighbours import Neighbours
from swarm_server.net.push import ChannelPool
from swarm_server.net.validation import RequestValidator
from swarm_server.rpc.registration import errors_as_status
from swarm_server.rpc.service import BlocksService, CallerChecks
from swarm_server.sessions.host import SessionManager
from swarm_server.sessions.services import SpanServices
from swarm_server.training.training_memory import TrainingMemory

MODEL, REVISION, NUM_BLOCKS = "toy", "0", 6
_NUM_ADDED = 3  # blocks after which something is added where a row sees
_LEAST_SEEN = 90.0  # of values
_PRIME = 9973  # sums stay exact in float32
_GONE = "gone"


# ---------------------------------------------------------------- blocks


def block_key(value: float, position_id: int) -> float:
    """What a block keeps of an input."""
    return value + 7 * position_id


class BlockHistory:
    """The keys of one block for one row, and the sum over them that an output is made of.

    ``keys``: floats of whole numbers, so that the sum is exact however it is added up.
    """

    def __init__(self, block: int, keys: Sequence[float] = ()) -> None:
        self.keys = list(keys)
        self._block = block
        self._weighted = sum(map(mul, keys, count(1)))

    def output(self, key: float) -> float:
        """Append a key and return the block's output for it, to which every key so far contributes."""
        self.keys.append(key)
        self._weighted += key * len(self.keys)
        return float(int(self._weighted % _PRIME * (self._block + 2) + 3 * key) % _PRIME)


def offset(row: Sequence[float]) -> int:
    """Where a row counts its positions from."""
    return int(row[0]) % 5


def additions_to(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """What is added after the first blocks, [rows, tokens, blocks, 1], as if large values were parts of pictures."""
    values = torch.tensor(rows)[..., None]
    return (values * (values >= _LEAST_SEEN) * torch.arange(1.0, _NUM_ADDED + 1))[..., None]


def model_output(rows: Sequence[Sequence[float]], sees: bool = False) -> torch.Tensor:
    """What all blocks make of whole rows, [rows, tokens, 1]; each row counts its positions from its own offset.

    ``sees``: ``additions_to`` the rows are added.
    """
    added = additions_to(rows)[..., 0].tolist()
    result = []
    for row, added_to_row in zip(rows, added, strict=True):
        values = list(row)
        for block in range(NUM_BLOCKS):
            history = BlockHistory(block)
            values = [history.output(block_key(value, position)) for position, value in enumerate(values, offset(row))]
            if sees and block < _NUM_ADDED:
                values = [value + more[block] for value, more in zip(values, added_to_row, strict=True)]
        result.append(values)
    return torch.tensor(result)[..., None]


@dataclass(frozen=True)
class ToyRow:
    """The keys of each block, and the outputs of the last."""

    keys: tuple[tuple[float, ...], ...]
    outputs: tuple[float, ...] = ()

    def crop(self, length: int) -> ToyRow:
        return ToyRow(tuple(values[:length] for values in self.keys), self.outputs[:length])


class ToyLayout:
    slots = ()

    def size_bytes(self, num_tokens: int) -> int:
        return num_tokens


@dataclass
class ToySession:
    blocks: Span
    rows: tuple[ToyRow, ...]
    lease: Lease
    reserved: int
    layout: ToyLayout = field(default_factory=ToyLayout)
    is_parked: bool = False

    @property
    def length(self) -> int:
        return len(self.rows[0].outputs) if self.rows else 0

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    def used_bytes(self) -> int:
        return self.batch_size * self.layout.size_bytes(self.length)

    def forget_promise(self) -> None:
        self.reserved = self.length if self.batch_size else 0


class ToyEngine:
    """Stands for the engine. ``spoils``: makes something else of outputs."""

    mixes_rows = True

    def __init__(self) -> None:
        self.spoils: Callable[[torch.Tensor], torch.Tensor] | None = None

    def layout_of(self, _blocks: Span, _keeps_outputs: bool) -> ToyLayout:
        return ToyLayout()

    def open(self, blocks: Span, batch_size: int, lease: Lease, *, reserved: int = 0, **_options: Any) -> ToySession:
        return ToySession(blocks, (ToyRow(((),) * len(blocks)),) * batch_size, lease, reserved)

    def close(self, session: ToySession) -> None:
        session.rows = ()
        session.lease.close()

    def run(self, session: ToySession, step: SessionStep) -> torch.Tensor:
        if not bool(torch.isfinite(step.inputs.hidden).all()):
            raise RequestRejected("the hidden states sent are not finite")
        rows = self._changed(session, step.start, step.changes)
        if step.inputs.hidden.shape[0] != len(rows):
            raise RequestRejected("hidden states of another number of rows came")
        positions = step.inputs.position_ids
        if positions is None:
            positions = torch.arange(step.start, step.start + step.inputs.hidden.shape[1])[None]
        positions = positions.expand(len(rows), -1)
        additions = step.inputs.additions
        if additions is None:
            additions = torch.zeros(*positions.shape, 0, 1)
        session.rows = tuple(
            self._extended(session.blocks, row, hidden[:, 0].tolist(), ids.tolist(), added[..., 0].tolist())
            for row, hidden, ids, added in zip(rows, step.inputs.hidden, positions, additions, strict=True)
        )
        output = self.outputs(session, step.start, session.length)
        if additions.shape[2] > session.blocks.end:
            output = replace(step.inputs, hidden=output).stacked
        return output if self.spoils is None else self.spoils(output)

    def outputs(self, session: ToySession, start: int, end: int) -> torch.Tensor:
        return torch.tensor([row.outputs[start:end] for row in session.rows])[..., None]

    def stored(self, session: ToySession, start: int, end: int) -> Stored:
        values = [[*(block[start:end] for block in row.keys), row.outputs[start:end]] for row in session.rows]
        return Stored(end - start, (end - start,), torch.tensor(values).view(torch.uint8).flatten())

    def adopt(self, session: ToySession, start: int, changes: Sequence[HistoryChange], stored: Stored) -> None:
        rows = self._changed(session, start, changes)
        shape = len(rows), len(session.blocks) + 1, stored.num_tokens
        if stored.data.numel() != 4 * torch.Size(shape).numel():
            raise RequestRejected("keys and values of another number of rows came")
        values = stored.data.clone().view(torch.float32).view(shape)
        session.rows = tuple(
            ToyRow(
                tuple((*old, *new.tolist()) for old, new in zip(row.keys, added, strict=False)),
                (*row.outputs, *added[-1].tolist()),
            )
            for row, added in zip(rows, values, strict=True)
        )

    def _changed(self, session: ToySession, start: int, changes: Sequence[HistoryChange]) -> tuple[ToyRow, ...]:
        rows = session.rows
        if not rows:
            raise RequestRejected("the session is closed")
        for change in changes:
            if isinstance(change, Reorder):
                rows = tuple(rows[i] for i in change.indices)
            elif isinstance(change, Crop):
                rows = self._cropped(rows, change.length)
            else:
                assert isinstance(change, RecordPast)
        return self._cropped(rows, start)

    @staticmethod
    def _cropped(rows: tuple[ToyRow, ...], length: int) -> tuple[ToyRow, ...]:
        if length > len(rows[0].outputs):
            raise RequestRejected(f"a step begins at position {length}, but the session has {len(rows[0].outputs)}")
        return tuple(row.crop(length) for row in rows)

    @staticmethod
    def _extended(blocks: Span, row: ToyRow, values: list[float], ids: list[int], added: list[list[float]]) -> ToyRow:
        histories = [BlockHistory(block, keys) for block, keys in zip(blocks, row.keys, strict=True)]
        outputs = list(row.outputs)
        for value, position, more in zip(values, ids, added, strict=True):
            for block, history in zip(blocks, histories, strict=True):
                value = history.output(block_key(value, position)) + (more[block] if block < len(more) else 0.0)
            outputs.append(value)
        return ToyRow(tuple(tuple(history.keys) for history in histories), tuple(outputs))


class ToyScheduler:
    """Computes where it is called, after a while; not at all while ``computes`` is not set.

    Attributes:
        held_s: how long a step of a session waits besides.
    """

    num_active = 1  # sessions that had a step lately
    queue_s = 0.0

    def __init__(self, engine: ToyEngine, chance: random.Random, counters: Counters) -> None:
        self.computes = asyncio.Event()
        self.computes.set()
        self.held_s: Callable[[ToySession], float] = lambda _session: 0.0
        self.num_waiting = 0
        self._engine = engine
        self._chance = chance
        self._counters = counters

    async def step(
        self, session: ToySession, step: SessionStep, _client: str, _user: str = "", *, is_background: bool = False
    ) -> torch.Tensor:
        self.num_waiting += 1
        try:
            await self._wait(session, step)
            self._counters.batches += 1
            return self._engine.run(session, step)
        finally:
            self.num_waiting -= 1

    def start(
        self,
        session: ToySession,
        step: SessionStep,
        deliver: Callable[[Any], None],
        client: str,
        user: str = "",
        *,
        is_background: bool = False,
    ) -> None:
        def end(done: asyncio.Task[torch.Tensor]) -> None:
            if not done.cancelled():
                deliver(done.exception() or done.result())

        task = asyncio.ensure_future(self.step(session, step, client, user, is_background=is_background))
        task.add_done_callback(end)

    def start_next(
        self,
        positions: NextPositions,
        rows: Sequence[Any],
        names: Sequence[tuple[str, str]],
        deliver: Callable[[Sequence[Any], Any], None],
        *,
        is_background: bool = False,
    ) -> None:
        for number, session in enumerate(positions.sessions):
            deliver_one = partial(deliver, [rows[number]])
            self.start(session, positions.step(number), deliver_one, *names[number], is_background=is_background)

    async def _wait(self, session: ToySession, _step: SessionStep) -> None:
        await asyncio.sleep(self._chance.uniform(0.001, 0.02) + self.held_s(session))
        await self.computes.wait()

    def forget(self, session: ToySession) -> None:
        """It has come to its end."""

    async def call(self, call: Callable[[], Any], _client: str = "") -> Any:
        await asyncio.sleep(self._chance.uniform(0, 0.002))
        return call()


# ---------------------------------------------------------------- servers


class ToyServer:
    """One server. What others have sent to it, and its tasks, die with it."""

    def __init__(
        self, net: Net, name: str, span: Span, max_step_tokens: int, capacity: int, idle_timeout_s: float
    ) -> None:
        self.name, self.span = name, span
        self.awake = asyncio.Event()
        self.awake.set()
        self.alive = True
        self.tasks: dict[asyncio.Task, None] = {}  # in order: runs can be repeated
        self.engine = ToyEngine()
        self.budget = CacheBudget(capacity, 1)
        validator = RequestValidator(MODEL, REVISION, span, 1, None, max_step_tokens=max_step_tokens)

        async def connect(address: str, *_options: Any) -> Channel:
            return net.connect(name, address)

        counters = Counters()
        self.scheduler = scheduler = net.new_scheduler(self.engine, net.chance, counters)
        training = TrainingMemory(self.budget)
        neighbours = Neighbours(ChannelPool(connect), lambda: net.view(MODEL))
        services = SpanServices(self.engine, scheduler, self.budget, validator, neighbours, training, counters=counters)
        self.host = SessionManager(services, 100)
        callers, rest = StreamOwners(), {"signer": None, "judge": None, "offering": None}
        hosted, record = lambda: self.host, self.record().to_proto
        self.service = BlocksService(hosted, record, idle_timeout_s, Arrivals(), callers, **rest)

    def record(self) -> ServerRecord:
        return ServerRecord(self.name, (self.name,), MODEL, REVISION, NUM_BLOCKS, self.span, tokens_per_s=100.0)

    def run(self, coroutine: Any) -> asyncio.Task:
        task = asyncio.ensure_future(coroutine)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


class Net:
    """Servers by name, and which pairs cannot reach each other at present.

    Attributes:
        new_scheduler: makes the compute thread of a server.
    """

    new_scheduler = ToyScheduler

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.servers: dict[str, ToyServer] = {}
        self.walls: set[frozenset[str]] = set()
        self.streams: dict[Stream, None] = {}

    def start(
        self, name: str, span: Span, max_step_tokens: int = 16, capacity: int = 10**6, idle_timeout_s: float = 1e9
    ) -> ToyServer:
        self.servers[name] = server = ToyServer(self, name, span, max_step_tokens, capacity, idle_timeout_s)
        return server

    def kill(self, name: str) -> None:
        server = self.servers[name]
        server.alive = False
        server.awake.set()
        for task in list(server.tasks):
            task.cancel()
        for stream in list(self.streams):
            if stream.server is server or stream.client == name:
                stream.end(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def cut(self, one: str, other: str) -> None:
        """Ends the streams between two, and lets no new ones be."""
        self.walls.add(frozenset((one, other)))
        for stream in list(self.streams):
            if {stream.client, stream.server.name} == {one, other}:
                stream.end(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def reachable(self, one: str, server: ToyServer) -> bool:
        sender = self.servers.get(one)
        return server.alive and (sender is None or sender.alive) and frozenset((one, server.name)) not in self.walls

    is_alive, is_alone = True, False  # as a node of the DHT

    async def view(self, _model: str, *_options: object) -> SwarmView:
        """As the DHT gives it: late, those that are dead still there."""
        await asyncio.sleep(self.chance.uniform(0, 0.05))
        return SwarmView.of(server.record() for server in self.servers.values())

    async def shutdown(self) -> None:
        pass

    def connect(self, client: str, name: str) -> Channel:
        server = self.servers.get(name)
        if server is None or not self.reachable(client, server):
            raise PeerUnavailable(f"nobody answers at {name}", name)
        return Channel(self, client, server)

    async def connect_client(self, record: ServerRecord, config: ClientConfig) -> ServerConnection:
        await asyncio.sleep(0.001)
        return ServerConnection(record, self.connect("client", record.peer_id), config)


# ---------------------------------------------------------------- gRPC


class Channel:
    """What generated stubs need of a gRPC channel."""

    def __init__(self, net: Net, client: str, server: ToyServer) -> None:
        self._net, self._client, self._server = net, client, server

    def stream_stream(self, path: str, **_options: Any) -> Callable:
        method = getattr(self._server.service, path.rpartition("/")[2])
        return lambda **_options: Stream(self._net, self._client, self._server, method)

    def unary_unary(self, path: str, **_options: Any) -> Callable:
        async def call(request: Any, timeout: float = 1e9) -> Any:
            stream = Stream(self._net, self._client, self._server, None)
            method = getattr(self._server.service, path.rpartition("/")[2])
            try:
                copied = _all_of(request) if isinstance(request, list) else _copied(request)
                return await asyncio.wait_for(stream.answer(method, copied), timeout)
            except TimeoutError:
                raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

        return lambda request, timeout=1e9: Answering(call(request, timeout))

    def stream_unary(self, path: str, **_options: Any) -> Callable:
        """For ``Reroute``: toy blocks take no adapters."""
        answered = self.unary_unary(path)
        return lambda requests, timeout=1e9: answered(list(requests), timeout)

    unary_stream = unary_unary  # the calls for weights, which nobody makes here

    async def close(self) -> None:
        pass

    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.IDLE


class Answering:
    """A call of one answer, which is waited for; it forgets nothing that gRPC would."""

    def __init__(self, answer: Coroutine[Any, Any, Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._answer.__await__()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        pass

    def cancel(self) -> None:
        self._answer.close()


class Context:
    """What a handler needs of a gRPC server context."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.code, self.details = grpc.StatusCode.OK, ""

    def client(self) -> str:
        return self._stream.client

    def peer(self) -> str:
        return ""

    async def write(self, message: Any) -> None:
        if self._stream.code_value is not None:
            raise grpc.aio.UsageError("the stream has ended")
        self._stream.replies.put(_copied(message))

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


class StreamOwners(CallerChecks):
    """Checks that take each caller for the client of its simulated stream, where no TLS shows who calls."""

    def admit(self, context: Any, role: Role = Role.CLIENT) -> Caller:
        return Caller(context.client())


async def _call(method: Callable, request: Any, context: Context) -> Any:
    """As ``registration`` calls it."""
    async with errors_as_status(context, Counters()):
        return await method(request, context)


class Wire:
    """Messages in one direction: late, but in order; nothing leaves or reaches a server that sleeps."""

    def __init__(self, net: Net, ends: Sequence[asyncio.Event]) -> None:
        self._net, self._ends = net, ends
        self._queue: asyncio.Queue = asyncio.Queue()
        self._ready_s = 0.0

    def put(self, message: Any) -> None:
        now = asyncio.get_running_loop().time()
        self._ready_s = max(self._ready_s, now + self._net.chance.uniform(0.0005, 0.01))
        self._queue.put_nowait((self._ready_s, message))

    def put_now(self, message: Any) -> None:
        """All that was on its way is lost."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait((0.0, message))

    async def get(self) -> Any:
        ready_s, message = await self._queue.get()
        delay = ready_s - asyncio.get_running_loop().time()
        if delay > 0:
            await asyncio.sleep(delay)
        for awake in self._ends if ready_s else ():
            await awake.wait()
        return message


class Stream:
    """A call: what grpc.aio gives to the client, and the handler's task on the server."""

    def __init__(self, net: Net, client: str, server: ToyServer, method: Callable | None) -> None:
        self.net, self.client, self.server = net, client, server
        self.code_value: grpc.StatusCode | None = None
        self.details_value = ""
        self._cancelled = False
        self.task: asyncio.Task | None = None
        ends = [server.awake, *([net.servers[client].awake] if client in net.servers else [])]
        self.requests, self.replies = Wire(net, ends), Wire(net, ends)
        net.streams[self] = None
        if not net.reachable(client, server):
            self.end(grpc.StatusCode.UNAVAILABLE, "failed to connect")
        elif method is not None:
            self.task = server.run(self._handle(method))

    async def _handle(self, method: Callable) -> None:
        context = Context(self)
        await _call(method, self._incoming(), context)
        self._finish(context.code, context.details)

    async def _incoming(self):
        while (message := await self.requests.get()) is not _GONE:
            yield message

    async def answer(self, method: Callable, request: Any) -> Any:
        """A unary call."""
        if self.code_value is not None:
            raise rpc_error(self.code_value, self.details_value)
        await asyncio.sleep(self.net.chance.choice([0.0002, 0.01]))
        await self.server.awake.wait()
        if self.code_value is None:
            context = Context(self)
            task = self.server.run(_call(method, request, context))
            try:
                reply = await asyncio.shield(task)
                await asyncio.sleep(self.net.chance.choice([0.0002, 0.01]))
                if context.code is not grpc.StatusCode.OK:
                    self._finish(context.code, context.details)
            except asyncio.CancelledError:
                if not task.cancelled():
                    raise
            await self.server.awake.wait()
        self.net.streams.pop(self, None)
        if self.code_value is not None:
            raise rpc_error(self.code_value, self.details_value)
        return reply

    def _finish(self, code: grpc.StatusCode, details: str) -> None:
        """The server has ended the call; what it has said before still arrives."""
        if self.code_value is None:
            self.code_value, self.details_value = code, details
            self.replies.put(_GONE)
            self.net.streams.pop(self, None)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """The connection is gone; what was on its way is lost."""
        if self.code_value is None:
            self.code_value, self.details_value = code, details
            self.net.streams.pop(self, None)
            self.replies.put_now(_GONE)
            if self.task is not None:
                self.task.cancel()  # as grpc.aio does

    # The client's side, as grpc.aio's StreamStreamCall behaves.

    async def write(self, message: Any) -> None:
        await asyncio.sleep(0)
        if self._cancelled:
            raise asyncio.CancelledError
        if self.code_value is not None:
            raise asyncio.InvalidStateError("the call has ended")
        self.requests.put(_copied(message))

    async def done_writing(self) -> None:
        self.requests.put(_GONE)

    async def read(self) -> Any:
        message = await self.replies.get()
        if self._cancelled:
            raise asyncio.CancelledError
        if message is not _GONE:
            return message
        self.replies.put(_GONE)
        if self.code_value is not grpc.StatusCode.OK:
            raise rpc_error(self.code_value, self.details_value)
        return grpc.aio.EOF

    def __aiter__(self):
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """gRPC tells this what it may forget later; this call forgets nothing."""

    async def code(self) -> grpc.StatusCode:
        return self.code_value

    async def details(self) -> str:
        return self.details_value

    def cancel(self) -> None:
        if self.code_value is None:
            self._cancelled = True
            self.end(grpc.StatusCode.CANCELLED, "Locally cancelled")


async def _all_of(messages: Iterable[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield _copied(message)


def _copied(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """Return the error that grpc.aio raises for this code."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
