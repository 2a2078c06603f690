"""Speaks gRPC to one server; the only place of the client that knows grpc's errors."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from swarm_client.routing import Hop
from swarm_protocol.block_input import BlockInput
from swarm_protocol.codec import Assembler, encode, encode_mask
from swarm_protocol.errors import BadReply, PeerUnavailable, RequestRejected, SwarmError, from_status
from swarm_protocol.identity import pinned_channel
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksStub
from swarm_protocol.records import ServerRecord
from swarm_protocol.span import Span
from swarm_protocol.wire import CLIENT_OPTIONS, WIRE_VERSION

CONNECT_TIMEOUT_S = 4.0
OPEN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
PROBE_AFTER_S = 1.0  # without an answer, a server is asked whether it is still there
PROBE_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class WireTensor:
    """A tensor in wire form; hidden states pass from hop to hop without being decoded."""

    header: pb.Tensor
    parts: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, codec: int = pb.RAW) -> WireTensor:
        header, parts = encode(tensor, codec)
        return cls(header, tuple(parts))

    def decode(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, which must be finite and have this shape and dtype; raises BadReply otherwise."""
        try:
            assembler = Assembler(self.header)
            for part in self.parts:
                assembler.add(part)
        except RequestRejected as error:
            raise BadReply(f"the server's answer cannot be decoded: {error}") from None
        if not assembler.complete or assembler.shape != tuple(shape) or assembler.dtype != dtype:
            raise BadReply(
                f"the server answered {list(assembler.shape)} of {assembler.dtype}: expected {list(shape)} of {dtype}"
            )
        tensor = assembler.tensor()
        if not bool(torch.isfinite(tensor).all()):
            raise BadReply("the server answered values that are not finite (NaN or infinity)")
        return tensor


@dataclass(frozen=True)
class Context:
    """What accompanies hidden states unchanged through all hops, in wire form."""

    attention_mask: pb.AttentionMask | None
    position_ids: pb.Tensor | None

    @classmethod
    def of(cls, inputs: BlockInput) -> Context:
        positions = None if inputs.position_ids is None else encode(inputs.position_ids.to(torch.int64))[0]
        return cls(encode_mask(inputs.attention_mask), positions)


class Server:
    """A connection to one server of one model."""

    def __init__(self, record: ServerRecord, channel: grpc.aio.Channel, step_timeout_s: float) -> None:
        self.record = record
        self._channel = channel
        self._stub = BlocksStub(channel)
        self._step_timeout_s = step_timeout_s

    @classmethod
    async def connect(cls, record: ServerRecord, step_timeout_s: float) -> Server:
        """Raises PeerUnavailable if none of its addresses answers, BadReply if somebody else does."""
        error: PeerUnavailable | None = None
        for address in record.addresses:
            try:
                channel = await pinned_channel(address, record.tls_fingerprint, CLIENT_OPTIONS, CONNECT_TIMEOUT_S)
                return cls(record, channel, step_timeout_s)
            except PeerUnavailable as failure:
                error = failure
        reason = error or "it announces no address"
        raise PeerUnavailable(f"server {record.short_id} cannot be reached: {reason}", record.peer_id, record.span)

    def leads_to(self, record: ServerRecord) -> bool:
        """Whether this connection is still the right one for a newer record of the server."""
        ours = self.record
        return (ours.addresses, ours.tls_fingerprint) == (record.addresses, record.tls_fingerprint)

    async def close(self) -> None:
        await self._channel.close()

    async def ping(self) -> float:
        """Round-trip time in seconds."""
        async with translated(self.record):
            start = asyncio.get_running_loop().time()
            await self._stub.Describe(pb.DescribeRequest(), timeout=CONNECT_TIMEOUT_S)
            return asyncio.get_running_loop().time() - start

    async def open(self, number: int, span: Span, request: pb.Open, inbox: Inbox) -> HopSession:
        """Opens hop ``number`` of a session; its answers go to ``inbox``. Raises PeerBusy if there is no room."""
        request.contract.CopyFrom(self._contract(span))
        hop = HopSession(number, Hop(self.record, span), self._stub.Session(), inbox, request, self)
        await hop.open(request, OPEN_TIMEOUT_S)
        return hop

    async def progress(self, request: pb.ProgressRequest, span: Span, timeout_s: float) -> pb.SessionProgress:
        """How far one of the server's sessions is; raises SessionLost if the server does not know it."""
        async with translated(self.record, span):
            return await self._stub.Progress(request, timeout=timeout_s)

    async def reroute(self, request: pb.RerouteRequest, span: Span, timeout_s: float) -> pb.SessionProgress:
        async with translated(self.record, span):
            return await self._stub.Reroute(request, timeout=timeout_s)

    async def copy(self, request: pb.CopyRequest, span: Span, timeout_s: float) -> pb.SessionProgress:
        async with translated(self.record, span):
            return await self._stub.Copy(request, timeout=timeout_s)

    async def forward(self, span: Span, hidden: WireTensor, context: Context) -> WireTensor:
        """Raises PeerUnavailable when the server stops answering, however long the pass takes."""
        return await self._watched(self._forward(span, hidden, context), span)

    async def backward(self, span: Span, hidden: WireTensor, grad: WireTensor, context: Context) -> WireTensor:
        """Like ``forward``."""
        return await self._watched(self._backward(span, hidden, grad, context), span)

    async def _watched(self, work: Coroutine[Any, Any, WireTensor], span: Span) -> WireTensor:
        """Asks the server whether it is there while it works."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=PROBE_AFTER_S))[0]:
                async with translated(self.record, span):
                    await self._stub.Describe(pb.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
            return task.result()
        finally:
            task.cancel()

    async def _forward(self, span: Span, hidden: WireTensor, context: Context) -> WireTensor:
        call = self._stub.Forward(timeout=self._step_timeout_s)
        async with translated(self.record, span, call):
            await call.write(pb.ForwardRequest(forward=self._forward_message(span, hidden, context)))
            for part in hidden.parts:
                await call.write(pb.ForwardRequest(more=part))
            await call.done_writing()
            return await _read_tensor(call, hidden, self.record, span)

    async def _backward(self, span: Span, hidden: WireTensor, grad: WireTensor, context: Context) -> WireTensor:
        call = self._stub.Backward(timeout=self._step_timeout_s)
        async with translated(self.record, span, call):
            await call.write(pb.BackwardRequest(forward=self._forward_message(span, hidden, context)))
            for part in hidden.parts:
                await call.write(pb.BackwardRequest(more=part))
            await call.write(pb.BackwardRequest(grad=grad.header))
            for part in grad.parts:
                await call.write(pb.BackwardRequest(more=part))
            await call.done_writing()
            return await _read_tensor(call, hidden, self.record, span)

    def _forward_message(self, span: Span, hidden: WireTensor, context: Context) -> pb.Forward:
        return pb.Forward(
            contract=self._contract(span),
            hidden=hidden.header,
            attention_mask=context.attention_mask,
            position_ids=context.position_ids,
        )

    def _contract(self, span: Span) -> pb.Contract:
        return pb.Contract(
            wire_version=WIRE_VERSION,
            model=self.record.model,
            revision=self.record.revision,
            blocks=pb.Span(start=span.start, end=span.end),
        )


@dataclass(frozen=True)
class Answer:
    """A hop's outputs of one step; None if none was wanted. ``relay``: they are for the next hop of this ``route``."""

    hop: int
    step: int
    hidden: WireTensor | None
    relay: bool
    route: int = 0


@dataclass(frozen=True)
class Trouble:
    """A hop refused a step, or failed altogether."""

    hop: int
    step: int | None  # None: the hop is gone
    error: SwarmError


@dataclass(frozen=True)
class Leaving:
    """A hop's server wants to leave: the session should move to another."""

    hop: int


class Inbox(asyncio.Queue["Answer | Trouble | Leaving"]):
    """What the hops of a session have to say. ``on_leaving`` hears at once of servers that want to leave."""

    on_leaving: Callable[[int], None] | None = None


class HopSession:
    """One server's part of a session: an open stream, read all the time and written to in the background.

    Attributes:
        number: tells the hops of a session apart.
        session_key: by which other servers and calls find the session.
        changed_number: the rows came with the changes of steps up to this number in them.
        history: steps by which the server learns what came before it, by number.
        seen_number: how far the server was when it was last asked.
        next_number: which hop the outputs go to; None: to the client.
        route: how often that was to change; ``held``: the server does nothing until it changes again.
    """

    def __init__(
        self,
        number: int,
        hop: Hop,
        call: grpc.aio.StreamStreamCall,
        inbox: Inbox,
        request: pb.Open | None = None,
        server: Server | None = None,
    ) -> None:
        self.number = number
        self.hop = hop
        self.max_step_tokens = 0
        self.session_key = request.session_key if request else b""
        self.changed_number = request.changed_number if request else 0
        self.history: dict[int, Any] = {}
        self.seen_number = 0
        self.next_number: int | None = None
        self.route = 0
        self.leaving = False
        self.held = False
        self.ended = False
        self._server = server
        self._call = call
        self._inbox = inbox
        self._reading: asyncio.Task | None = None
        self._writing = asyncio.Lock()  # gRPC breaks a call that is given a message while it takes another
        self._outbox: deque[tuple[pb.Step, Sequence[bytes]]] = deque()
        self._posting: asyncio.Task | None = None

    @property
    def span(self) -> Span:
        return self.hop.span

    @property
    def gone(self) -> bool:
        """Whether the stream has ended."""
        return self.ended or self._reading is None or self._reading.done()

    async def open(self, request: pb.Open, timeout_s: float) -> None:
        server, span = self.hop.server, self.hop.span
        async with translated(server, span, self._call):
            try:
                reply = await asyncio.wait_for(self._opened(request), timeout_s)
            except asyncio.TimeoutError:
                self._call.cancel()
                raise no_answer(server, span, timeout_s) from None
            except asyncio.CancelledError:
                self._call.cancel()
                raise
        if reply.WhichOneof("kind") != "opened":
            self._call.cancel()
            raise self._out_of_turn()
        self.max_step_tokens = max(1, reply.opened.max_step_tokens)
        self._reading = asyncio.ensure_future(self._read_all())

    async def _opened(self, request: pb.Open) -> pb.SessionReply:
        await self._call.write(pb.SessionRequest(open=request))
        return await self._read()

    def post(self, step: pb.Step, parts: Sequence[bytes]) -> None:
        """Sends a step in the background, after those that were posted before; trouble goes to the inbox."""
        self._outbox.append((step, parts))
        if self._posting is None or self._posting.done():
            self._posting = asyncio.ensure_future(self._post_all())

    def unpost(self) -> None:
        """Takes back what is not sent yet."""
        self._outbox.clear()

    async def send(self, step: pb.Step, parts: Sequence[bytes]) -> None:
        """Sends a step and the further parts of its hidden states."""
        async with self._writing, translated(self.hop.server, self.hop.span, self._call):
            await self._call.write(pb.SessionRequest(step=step))
            for part in parts:
                await self._call.write(pb.SessionRequest(more=part))

    async def close(self) -> None:
        """Ends the session on the server; never fails. The reader ends with the stream: it must not be cancelled."""
        if self.held:  # it would not hear us
            self.abandon()
            return
        self.ended = True
        self._outbox.clear()
        try:
            await asyncio.wait_for(self._say_goodbye(), CLOSE_TIMEOUT_S)
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError, asyncio.TimeoutError):
            self._call.cancel()

    def abandon(self) -> None:
        """Ends the stream at once: the server is believed to be gone."""
        self.ended = True
        self._outbox.clear()
        self._call.cancel()

    async def progress(self, hold: bool = False, timeout_s: float = OPEN_TIMEOUT_S) -> pb.SessionProgress:
        """How far the server is. ``hold``: it goes no further until ``reroute``."""
        request = pb.ProgressRequest(session_key=self.session_key, hold=hold)
        self.held |= hold
        return await self._server.progress(request, self.span, timeout_s)

    async def reroute(self, to: HopSession, resend: Sequence[pb.Step]) -> None:
        """Outputs go to another hop from now on, those of the steps of ``resend`` first."""
        self.route += 1  # even if it fails: the server may have heard of it
        key, route = self.session_key, self.route
        request = pb.RerouteRequest(session_key=key, next=to.as_next(), resend=resend, route=route)
        await self._server.reroute(request, self.span, OPEN_TIMEOUT_S)
        self.held = False
        self.next_number = to.number

    async def copy(self, to: HopSession, timeout_s: float) -> None:
        """Another session gets all keys and values, and those of every later step."""
        request = pb.CopyRequest(session_key=self.session_key, to=to.as_next(), follow=True)
        await self._server.copy(request, self.span, timeout_s)

    def as_next(self) -> pb.NextHop:
        """How other servers reach this session."""
        server = self.hop.server
        return pb.NextHop(
            peer_id=server.peer_id,
            addresses=server.addresses,
            tls_fingerprint=server.tls_fingerprint,
            session_key=self.session_key,
        )

    async def _say_goodbye(self) -> None:
        async with self._writing:
            await self._call.write(pb.SessionRequest(close=pb.Close()))
            await self._call.done_writing()

    async def _post_all(self) -> None:
        try:
            while self._outbox:
                step, parts = self._outbox.popleft()
                await self.send(step, parts)
        except SwarmError as error:
            self._lost(error)
        except asyncio.CancelledError:  # to cancel the call cancels its writer
            self._lost(self._ended_error())
            if not self.ended:
                raise

    async def _read_all(self) -> None:
        try:
            async with translated(self.hop.server, self.hop.span, self._call):
                while True:
                    event = await self._read_event()
                    if isinstance(event, Leaving):
                        self.leaving = True
                        if self._inbox.on_leaving is not None:
                            self._inbox.on_leaving(self.number)
                    self._inbox.put_nowait(event)
        except SwarmError as error:
            self._lost(error)
        except asyncio.CancelledError:  # the call was cancelled here
            self._lost(self._ended_error())
            if not self.ended:
                raise

    def _lost(self, error: SwarmError) -> None:
        if not self.ended:
            self._inbox.put_nowait(Trouble(self.number, None, error))

    def _ended_error(self) -> PeerUnavailable:
        server = self.hop.server
        return PeerUnavailable(f"the stream to server {server.short_id} has ended", server.peer_id, self.span)

    async def _read_event(self) -> Answer | Trouble | Leaving:
        reply = await self._read()
        kind = reply.WhichOneof("kind")
        if kind == "leaving":
            return Leaving(self.number)
        if kind == "failure":
            codes = {code.value[0]: code for code in grpc.StatusCode}
            status = codes.get(reply.failure.status, grpc.StatusCode.UNKNOWN)
            server = self.hop.server
            error = from_status(status, reply.failure.message, server.peer_id, self.hop.span)
            return Trouble(self.number, reply.failure.number, error)
        if kind != "output":
            raise self._out_of_turn()
        output = reply.output
        hidden = await self._read_tensor(output.hidden) if output.HasField("hidden") else None
        return Answer(self.number, output.number, hidden, output.relay, output.route)

    async def _read_tensor(self, header: pb.Tensor) -> WireTensor:
        try:
            Assembler(header)
        except RequestRejected as error:
            raise BadReply(
                f"server {self.hop.server.short_id} sent a broken answer: {error}",
                self.hop.server.peer_id,
                self.hop.span,
            ) from None
        parts, received = [], len(header.data)
        while received < header.size_bytes:
            reply = await self._read()
            if reply.WhichOneof("kind") != "more":
                raise self._out_of_turn()
            parts.append(reply.more)
            received += len(reply.more)
        return WireTensor(header, tuple(parts))

    async def _read(self) -> pb.SessionReply:
        reply = await self._call.read()
        if reply is grpc.aio.EOF:
            server, span = self.hop.server, self.hop.span
            code, details = await self._call.code(), await self._call.details()
            if code is grpc.StatusCode.OK:
                raise self._ended_error()
            raise from_status(code, details, server.peer_id, span)
        return reply

    def _out_of_turn(self) -> BadReply:
        server = self.hop.server
        return BadReply(f"server {server.short_id} answered out of turn", server.peer_id, self.hop.span)


def no_answer(server: ServerRecord, span: Span, timeout_s: float) -> PeerUnavailable:
    return PeerUnavailable(f"server {server.short_id} did not answer within {timeout_s:g} s", server.peer_id, span)


@asynccontextmanager
async def translated(
    server: ServerRecord, span: Span | None = None, call: grpc.aio.Call | None = None
) -> AsyncIterator[None]:
    """Turns grpc's errors into ours."""
    try:
        yield
    except grpc.RpcError as error:
        details = error.details() or "no details"
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            details = f"server {server.short_id} at {server.addresses[0]} cannot be reached: {details}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"server {server.short_id} at {server.addresses[0]} does not answer"
        raise from_status(error.code(), details, server.peer_id, span) from None
    except asyncio.InvalidStateError:  # the server has ended the stream before it was told everything
        code = await call.code()
        if code is grpc.StatusCode.OK:
            details = f"the stream to server {server.short_id} has ended"
            raise PeerUnavailable(details, server.peer_id, span) from None
        raise from_status(code, await call.details(), server.peer_id, span) from None


async def _read_tensor(
    call: grpc.aio.StreamStreamCall, sent: WireTensor, server: ServerRecord, span: Span
) -> WireTensor:
    header, parts, received = None, [], 0
    async for reply in call:
        if header is None:
            if reply.WhichOneof("kind") != "output":
                break
            header = reply.output
            _require_like(sent.header, header, server, span)
            received = len(header.data)
            continue
        parts.append(reply.more)
        received += len(reply.more)
        if received > header.size_bytes:
            break
    if header is None or received != header.size_bytes:
        call.cancel()
        raise BadReply(f"server {server.short_id} sent a broken answer", server.peer_id, span)
    return WireTensor(header, tuple(parts))


def _require_like(sent: pb.Tensor, received: pb.Tensor, server: ServerRecord, span: Span) -> None:
    """Blocks keep shape and dtype; raises BadReply before more of the answer is read."""
    try:
        Assembler(received)
    except RequestRejected as error:
        raise BadReply(f"server {server.short_id} sent a broken answer: {error}", server.peer_id, span) from None
    if (received.dtype, list(received.shape)) != (sent.dtype, list(sent.shape)):
        raise BadReply(
            f"server {server.short_id} answered {list(received.shape)} of {pb.DType.Name(received.dtype)}: "
            f"expected {list(sent.shape)} of {pb.DType.Name(sent.dtype)}",
            server.peer_id,
            span,
        )
