"""The gRPC service: decodes and validates requests, hands them to the compute thread, encodes replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial, wraps

import grpc
import torch

from swarm_protocol.block_input import BlockInput
from swarm_protocol.codec import Assembler, encode
from swarm_protocol.errors import AccessDenied, PeerBusy, PeerError, RequestRejected, SessionLost
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksServicer
from swarm_server.engine import Engine, Session
from swarm_server.kv_cache import CacheBudget, Lease
from swarm_server.scheduler import Priority, Scheduler
from swarm_server.validation import Rules

_logger = logging.getLogger(__name__)
_REFUSALS = (RequestRejected, AccessDenied, PeerError)


def _errors_as_status(handler):
    """Answers our errors with their gRPC status; anything else is logged here and told in one sentence there."""

    @wraps(handler)
    async def wrapped(self, requests, context):
        try:
            async for reply in handler(self, requests, context):
                yield reply
        except _REFUSALS as error:
            await context.abort(error.status, str(error))
        except Exception:
            _logger.exception("a request failed")
            await context.abort(grpc.StatusCode.INTERNAL, "the server failed while it computed; its log says why")

    return wrapped


class BlocksService(BlocksServicer):
    """Serves one engine. Requests are refused before memory is taken for them; none can end the server."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        budget: CacheBudget,
        rules: Rules,
        record: Callable[[], pb.ServerRecord],
        idle_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._budget = budget
        self._rules = rules
        self._record = record
        self._idle_timeout_s = idle_timeout_s

    @_errors_as_status
    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionReply]:
        stream = SessionStream(self._engine, self._scheduler, self._budget, self._rules)
        try:
            while (request := await self._next(requests)) is not None and request.WhichOneof("kind") != "close":
                for reply in await stream.handle(request):
                    yield reply
        finally:
            stream.release()

    @_errors_as_status
    async def Forward(
        self, requests: AsyncIterator[pb.ForwardRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TensorReply]:
        request = await self._first(requests, "forward")
        blocks = self._rules.blocks(request.forward.contract)
        hidden = await self._collect_input(request.forward, requests)
        inputs = self._block_input(request.forward, hidden)
        output = await self._scheduler.run(Priority.TRAINING, partial(self._engine.forward, blocks, inputs))
        for reply in _in_parts(output):
            yield reply

    @_errors_as_status
    async def Backward(
        self, requests: AsyncIterator[pb.BackwardRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TensorReply]:
        request = await self._first(requests, "forward")
        blocks = self._rules.blocks(request.forward.contract)
        hidden = await self._collect_input(request.forward, requests)
        inputs = self._block_input(request.forward, hidden)
        request = await self._first(requests, "grad")
        if tuple(request.grad.shape) != tuple(hidden.shape):
            raise RequestRejected(
                f"gradient has shape {list(request.grad.shape)}: expected that of the hidden states, "
                f"{list(hidden.shape)}"
            )
        grad = await self._collect(self._rules.hidden(request.grad), requests)
        output = await self._scheduler.run(Priority.TRAINING, partial(self._engine.backward, blocks, inputs, grad))
        for reply in _in_parts(output):
            yield reply

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.ServerRecord:
        return self._record()

    async def _next(self, requests: AsyncIterator):
        """The next message; None at the end of the stream or after too long a silence."""
        try:
            return await asyncio.wait_for(anext(requests, None), self._idle_timeout_s)
        except asyncio.TimeoutError:
            raise SessionLost(f"the session was closed after {self._idle_timeout_s:g} s without a request") from None

    async def _first(self, requests: AsyncIterator, kind: str):
        request = await self._next(requests)
        if request is None or request.WhichOneof("kind") != kind:
            raise RequestRejected(f"expected a message of kind {kind!r}")
        return request

    async def _collect_input(self, forward: pb.Forward, requests: AsyncIterator) -> torch.Tensor:
        arriving = self._rules.hidden(forward.hidden)
        self._rules.length(arriving.shape[1])
        return await self._collect(arriving, requests)

    async def _collect(self, assembler: Assembler, requests: AsyncIterator) -> torch.Tensor:
        while not assembler.complete:
            request = await self._first(requests, "more")
            assembler.add(request.more)
        return assembler.tensor()

    def _block_input(self, forward: pb.Forward, hidden: torch.Tensor) -> BlockInput:
        batch_size, num_tokens, _ = hidden.shape
        mask = positions = None
        if forward.HasField("attention_mask"):
            mask = self._rules.mask(forward.attention_mask, batch_size, num_tokens)
        if forward.HasField("position_ids"):
            positions = self._rules.positions(forward.position_ids, batch_size, num_tokens)
        return BlockInput(hidden, mask, positions)


class SessionStream:
    """One session's state on the wire. Refused requests leave the session as it was."""

    def __init__(self, engine: Engine, scheduler: Scheduler, budget: CacheBudget, rules: Rules) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._budget = budget
        self._rules = rules
        self._session: Session | None = None
        self._lease: Lease | None = None
        self._step: pb.Step | None = None  # whose hidden states are arriving
        self._arriving: Assembler | None = None
        self._refused = False  # parts of a refused step are still to come

    async def handle(self, request: pb.SessionRequest) -> list[pb.SessionReply]:
        """Raises an error that ends the session; a refusal that does not is among the replies."""
        kind = request.WhichOneof("kind")
        if kind == "open":
            return await self._open(request.open)
        if self._session is None:
            raise SessionLost("this server does not know the session: it must be opened first")
        if kind == "more":
            return await self._more(request.more)
        self._refused = False
        if self._arriving is not None:
            raise RequestRejected("a request came before all parts of the one before it")
        if kind == "step":
            return await self._start_step(request.step)
        await self._change(request)
        return []

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()
        self._session = self._lease = None

    async def _open(self, request: pb.Open) -> list[pb.SessionReply]:
        if self._session is not None:
            raise RequestRejected("the session is open already")
        blocks = self._rules.blocks(request.contract)
        batch_size = self._rules.batch_size(request.batch_size)
        self._rules.length(request.reserve_tokens)
        self._lease = self._budget.lease(len(blocks), batch_size * request.reserve_tokens)
        self._session = self._engine.open(blocks, batch_size)
        return [pb.SessionReply(opened=pb.Opened(tokens_left=self._budget.tokens_left))]

    async def _start_step(self, step: pb.Step) -> list[pb.SessionReply]:
        session = self._session
        try:
            if step.start_position != session.length:
                raise RequestRejected(
                    f"a step begins at position {step.start_position}, but the session has {session.length}"
                )
            arriving = self._rules.hidden(step.hidden, session.batch_size)
            num_positions = session.length + arriving.shape[1]
            self._rules.length(num_positions)
            self._lease.grow_to(session.batch_size * num_positions)
        except (RequestRejected, PeerBusy) as error:
            self._refused = True
            return [_failure(error)]
        self._step, self._arriving = step, arriving
        return await self._finish_step() if arriving.complete else []

    async def _more(self, part: bytes) -> list[pb.SessionReply]:
        if self._refused:
            return []
        if self._arriving is None:
            raise RequestRejected("a part of a tensor came without its beginning")
        self._arriving.add(part)
        return await self._finish_step() if self._arriving.complete else []

    async def _finish_step(self) -> list[pb.SessionReply]:
        session, step, hidden = self._session, self._step, self._arriving.tensor()
        self._step = self._arriving = None
        num_tokens = hidden.shape[1]
        try:
            mask = positions = None
            if step.HasField("attention_mask"):
                mask = self._rules.mask(step.attention_mask, session.batch_size, session.length + num_tokens)
            if step.HasField("position_ids"):
                positions = self._rules.positions(step.position_ids, session.batch_size, num_tokens)
            priority = Priority.DECODE if num_tokens == 1 else Priority.PREFILL
            inputs = BlockInput(hidden, mask, positions)
            output = await self._scheduler.run(priority, partial(self._engine.step, session, inputs))
        except (RequestRejected, PeerBusy) as error:
            return [_failure(error)]
        wire, parts = encode(output)
        return [pb.SessionReply(output=wire), *(pb.SessionReply(more=part) for part in parts)]

    async def _change(self, request: pb.SessionRequest) -> None:
        session, kind = self._session, request.WhichOneof("kind")
        if kind == "reorder":
            indices = torch.tensor(request.reorder.indices, dtype=torch.long)
            self._rules.batch_size(len(indices))
            if int(indices.max()) >= session.batch_size:
                raise RequestRejected(
                    f"reordering takes row {int(indices.max())} of a session that has {session.batch_size} rows"
                )
            self._lease.grow_to(len(indices) * session.length)
            await self._scheduler.run(Priority.DECODE, partial(self._engine.reorder, session, indices))
        elif kind == "crop":
            if request.crop.length > session.length:
                raise RequestRejected(f"cannot crop {session.length} positions to {request.crop.length}")
            await self._scheduler.run(Priority.DECODE, partial(self._engine.crop, session, request.crop.length))
        elif kind == "record_past":
            await self._scheduler.run(Priority.DECODE, partial(self._engine.record_past, session))
        else:
            raise RequestRejected("a request of unknown kind")


def _failure(error: RequestRejected | PeerBusy) -> pb.SessionReply:
    return pb.SessionReply(failure=pb.Failure(status=error.status.value[0], message=str(error)))


def _in_parts(tensor: torch.Tensor) -> list[pb.TensorReply]:
    wire, parts = encode(tensor)
    return [pb.TensorReply(output=wire), *(pb.TensorReply(more=part) for part in parts)]
