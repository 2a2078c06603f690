"""The gRPC service: decodes and validates requests, hands them to the compute thread, encodes replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import torch

from swarm_protocol.block_input import BlockInput
from swarm_protocol.codec import Assembler, encode
from swarm_protocol.errors import AccessDenied, PeerError, PeerMoved, RequestRejected, SessionLost
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksServicer
from swarm_protocol.span import Span
from swarm_protocol.wire import MAX_ECHO_BYTES
from swarm_server.host import Host
from swarm_server.sessions import HostedSession, StepReader
from swarm_server.validation import Rules

_logger = logging.getLogger(__name__)
_REFUSALS = (RequestRejected, AccessDenied, PeerError)


@asynccontextmanager
async def _errors_as_status(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Answers our errors with their gRPC status; anything else is logged here and told in one sentence there."""
    try:
        yield
    except _REFUSALS as error:
        await context.abort(error.status, str(error))
    except grpc.aio.BaseError as error:
        _logger.debug("a client went away: %s", error)
    except Exception:
        _logger.exception("a request failed")
        await context.abort(grpc.StatusCode.INTERNAL, "the server failed while it computed; its log says why")


class BlocksService(BlocksServicer):
    """Requests are refused before memory is taken for them; none can end the server.

    Attributes:
        host: of the sessions; None while the server loads other blocks.
    """

    def __init__(self, host: Host | None, record: Callable[[], pb.ServerRecord], idle_timeout_s: float) -> None:
        self.host = host
        self._record = record
        self._idle_timeout_s = idle_timeout_s

    async def Session(self, requests: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext) -> None:
        writing = asyncio.Lock()  # an output's parts stay together

        async def reply(replies: list[pb.SessionReply]) -> None:
            async with writing:
                try:
                    for message in replies:
                        await context.write(message)
                except grpc.aio.BaseError as error:  # whoever reads the stream notices too
                    _logger.debug("a client went away: %s", error)

        async with _errors_as_status(context):
            request = await self._next(requests)
            if request is None:
                return
            if request.WhichOneof("kind") != "open":
                raise SessionLost("this server does not know the session: it must be opened first")
            hosted = self._present().open(request.open, _client_of(context), reply)
            try:
                await hosted.announce()
                await self._serve(hosted, requests)
            finally:
                await asyncio.shield(hosted.close())

    async def Push(self, requests: AsyncIterator[pb.PushRequest], context: grpc.aio.ServicerContext) -> None:
        async with _errors_as_status(context):
            request = await self._first(requests, "session_key")
            hosted = self._find(request.session_key)
            # The client blames this stream's sender for one refusal, and would blame who takes its place for more.
            reader = StepReader(hosted, one_refusal=True)
            async for request in requests:
                kind = request.WhichOneof("kind")
                if kind == "step":
                    number = request.step.number
                    await reader.start(request.step)
                elif kind == "more":
                    await reader.more(request.more)
                else:
                    raise RequestRejected("a request of unknown kind")
                if not reader.is_reading:
                    await context.write(pb.PushReply(number=number))

    async def Progress(self, request: pb.ProgressRequest, context: grpc.aio.ServicerContext) -> pb.SessionProgress:
        async with _errors_as_status(context):
            return await self._find(request.session_key).progress(request.hold)

    async def Reroute(self, request: pb.RerouteRequest, context: grpc.aio.ServicerContext) -> pb.SessionProgress:
        async with _errors_as_status(context):
            return await self._find(request.session_key).reroute(request)

    async def Copy(self, request: pb.CopyRequest, context: grpc.aio.ServicerContext) -> pb.SessionProgress:
        async with _errors_as_status(context):
            return await self._find(request.session_key).copy(request.to)

    async def _serve(self, hosted: HostedSession, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Until the client closes the session, its stream ends, nothing has come for too long, or the host ends it."""
        reading = asyncio.ensure_future(_read(hosted, requests))
        ending = asyncio.ensure_future(hosted.host.ended.wait())
        try:
            while not reading.done():
                if ending.done():
                    raise PeerMoved("the server has left these blocks")
                silent_s = hosted.silent_s
                if silent_s >= self._idle_timeout_s:
                    raise SessionLost(f"the session was closed after {self._idle_timeout_s:g} s without a request")
                timeout_s = self._idle_timeout_s - silent_s
                await asyncio.wait([reading, ending], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            reading.result()
        finally:
            reading.cancel()
            ending.cancel()

    async def Forward(
        self, requests: AsyncIterator[pb.ForwardRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TensorReply]:
        async with _errors_as_status(context):
            host = self._present()
            host.require_staying()
            blocks, inputs = await self._read_input(host.rules, requests)
            outputs = [
                await host.scheduler.train(partial(host.engine.forward, blocks, rows))
                for rows, _ in _few_rows(host.rules, inputs)
            ]
            for reply in _in_parts(torch.cat(outputs)):
                yield reply

    async def Backward(
        self, requests: AsyncIterator[pb.BackwardRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.TensorReply]:
        async with _errors_as_status(context):
            host = self._present()
            host.require_staying()
            blocks, inputs = await self._read_input(host.rules, requests)
            request = await self._first(requests, "grad")
            if tuple(request.grad.shape) != tuple(inputs.hidden.shape):
                raise RequestRejected(
                    f"gradient has shape {list(request.grad.shape)}: expected that of the hidden states, "
                    f"{list(inputs.hidden.shape)}"
                )
            grad = await self._collect(host.rules.hidden(request.grad), requests)
            grads = [
                await host.scheduler.train(partial(host.engine.backward, blocks, rows, grad[which]))
                for rows, which in _few_rows(host.rules, inputs)
            ]
            for reply in _in_parts(torch.cat(grads)):
                yield reply

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.ServerRecord:
        return self._record()

    async def Echo(self, request: pb.EchoRequest, context: grpc.aio.ServicerContext) -> pb.EchoReply:
        async with _errors_as_status(context):
            if max(len(request.payload), request.reply_bytes) > MAX_ECHO_BYTES:
                raise RequestRejected(f"an echo is too long: expected at most {MAX_ECHO_BYTES} bytes each way")
            return pb.EchoReply(payload=bytes(request.reply_bytes))

    def _present(self) -> Host:
        """Raises PeerMoved if there is none at present."""
        if self.host is None:
            raise PeerMoved("the server is about to host other blocks")
        return self.host

    def _find(self, session_key: bytes) -> HostedSession:
        """Raises SessionLost if there is no such session."""
        if self.host is None:
            raise SessionLost("this server does not know the session")
        return self.host.find(session_key)

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

    async def _read_input(self, rules: Rules, requests: AsyncIterator) -> tuple[Span, BlockInput]:
        """What a pass without a session begins with."""
        forward = (await self._first(requests, "forward")).forward
        blocks = rules.blocks(forward.contract)
        arriving = rules.hidden(forward.hidden)
        rules.length(arriving.shape[1])
        return blocks, _block_input(rules, forward, await self._collect(arriving, requests))

    async def _collect(self, assembler: Assembler, requests: AsyncIterator) -> torch.Tensor:
        while not assembler.complete:
            request = await self._first(requests, "more")
            assembler.add(request.more)
        return assembler.tensor()


async def _read(hosted: HostedSession, requests: AsyncIterator[pb.SessionRequest]) -> None:
    reader = StepReader(hosted)
    async for request in requests:
        kind = request.WhichOneof("kind")
        if kind == "step":
            await reader.start(request.step)
        elif kind == "more":
            await reader.more(request.more)
        elif kind == "close":
            return
        elif kind == "open":
            raise RequestRejected("the session is open already")
        else:
            raise RequestRejected("a request of unknown kind")


def _few_rows(rules: Rules, inputs: BlockInput) -> Iterator[tuple[BlockInput, slice]]:
    """The batch in pieces that hold up decoding no longer than a chunk of a prompt, and which rows they are."""
    batch_size, num_tokens, _ = inputs.hidden.shape
    size = max(1, rules.max_step_tokens // num_tokens)
    for start in range(0, batch_size, size):
        which = slice(start, start + size)
        mask, positions = inputs.attention_mask, inputs.position_ids
        yield (
            BlockInput(
                inputs.hidden[which],
                None if mask is None else mask[which],
                positions if positions is None or len(positions) == 1 else positions[which],
            ),
            which,
        )


def _block_input(rules: Rules, forward: pb.Forward, hidden: torch.Tensor) -> BlockInput:
    batch_size, num_tokens, _ = hidden.shape
    mask = positions = None
    if forward.HasField("attention_mask"):
        mask = rules.mask(forward.attention_mask, batch_size, num_tokens)
    if forward.HasField("position_ids"):
        positions = rules.positions(forward.position_ids, batch_size, num_tokens)
    return BlockInput(hidden, mask, positions)


def _client_of(context: grpc.aio.ServicerContext) -> str:
    """Whose memory a session is: the address without its port."""
    return context.peer().rpartition(":")[0]


def _in_parts(tensor: torch.Tensor) -> list[pb.TensorReply]:
    wire, parts = encode(tensor)
    return [pb.TensorReply(output=wire), *(pb.TensorReply(more=part) for part in parts)]
