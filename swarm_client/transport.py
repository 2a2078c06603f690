"""Speaks gRPC to one server; the only place of the client that knows grpc's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import torch

from swarm_client.routing import Hop
from swarm_protocol.block_input import BlockInput
from swarm_protocol.codec import Assembler, encode, encode_mask
from swarm_protocol.errors import BadReply, PeerUnavailable, RequestRejected, from_status
from swarm_protocol.identity import pinned_channel
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksStub
from swarm_protocol.records import ServerRecord
from swarm_protocol.span import Span
from swarm_protocol.wire import CLIENT_OPTIONS, WIRE_VERSION

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class WireTensor:
    """A tensor in wire form; hidden states pass from hop to hop without being decoded."""

    header: pb.Tensor
    parts: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, codec: int = pb.RAW) -> WireTensor:
        header, parts = encode(tensor, codec)
        return cls(header, tuple(parts))

    def decode(self, like: torch.Tensor) -> torch.Tensor:
        """The tensor, which must be finite and have the shape and dtype of ``like``; raises BadReply otherwise."""
        try:
            assembler = Assembler(self.header)
            for part in self.parts:
                assembler.add(part)
        except RequestRejected as error:
            raise BadReply(f"the server's answer cannot be decoded: {error}") from None
        if not assembler.complete or assembler.shape != tuple(like.shape) or assembler.dtype != like.dtype:
            raise BadReply(
                f"the server answered {list(assembler.shape)} of {assembler.dtype}: "
                f"expected {list(like.shape)} of {like.dtype}"
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
        raise PeerUnavailable(str(error or "the server announces no address"), record.peer_id, record.span)

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

    async def open(self, span: Span, session_id: str, batch_size: int, reserve_tokens: int) -> HopSession:
        """Opens a session; raises PeerBusy if there is no room for ``batch_size × reserve_tokens``."""
        call = self._stub.Session()
        hop = HopSession(Hop(self.record, span), call, self._step_timeout_s)
        await hop.request(
            pb.SessionRequest(
                open=pb.Open(
                    contract=self._contract(span),
                    session_id=session_id,
                    batch_size=batch_size,
                    reserve_tokens=reserve_tokens,
                )
            ),
            "opened",
        )
        return hop

    async def forward(self, span: Span, hidden: WireTensor, context: Context) -> WireTensor:
        call = self._stub.Forward(timeout=self._step_timeout_s)
        async with translated(self.record, span, call):
            await call.write(pb.ForwardRequest(forward=self._forward_message(span, hidden, context)))
            for part in hidden.parts:
                await call.write(pb.ForwardRequest(more=part))
            await call.done_writing()
            return await _read_tensor(call, hidden, self.record, span)

    async def backward(self, span: Span, hidden: WireTensor, grad: WireTensor, context: Context) -> WireTensor:
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


class HopSession:
    """One server's part of a session: an open stream."""

    def __init__(self, hop: Hop, call: grpc.aio.StreamStreamCall, step_timeout_s: float) -> None:
        self.hop = hop
        self._call = call
        self._step_timeout_s = step_timeout_s

    async def step(self, start_position: int, hidden: WireTensor, context: Context) -> WireTensor:
        """Hidden states of new positions through this hop's blocks."""
        step = pb.Step(
            start_position=start_position,
            hidden=hidden.header,
            attention_mask=context.attention_mask,
            position_ids=context.position_ids,
        )
        async with translated(self.hop.server, self.hop.span, self._call):
            await self._call.write(pb.SessionRequest(step=step))
            for part in hidden.parts:
                await self._call.write(pb.SessionRequest(more=part))
        reply = await self._reply("output")
        _require_like(hidden.header, reply.output, self.hop.server, self.hop.span)
        parts, received = [], len(reply.output.data)
        while received < reply.output.size_bytes:
            part = (await self._reply("more")).more
            parts.append(part)
            received += len(part)
        return WireTensor(reply.output, tuple(parts))

    async def request(self, request: pb.SessionRequest, answer: str | None = None) -> None:
        """Sends a request that has no tensor; waits for ``answer`` if the request is answered."""
        async with translated(self.hop.server, self.hop.span, self._call):
            await self._call.write(request)
        if answer is not None:
            await self._reply(answer)

    async def close(self) -> None:
        """Ends the session on the server; never fails."""
        try:
            await self._call.write(pb.SessionRequest(close=pb.Close()))
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            self._call.cancel()

    async def _reply(self, kind: str) -> pb.SessionReply:
        server, span = self.hop.server, self.hop.span
        async with translated(server, span, self._call):
            try:
                reply = await asyncio.wait_for(self._call.read(), self._step_timeout_s)
            except asyncio.TimeoutError:
                self._call.cancel()
                raise PeerUnavailable(
                    f"server {server.short_id} did not answer within {self._step_timeout_s:g} s", server.peer_id, span
                ) from None
            if reply is grpc.aio.EOF:
                raise from_status(await self._call.code(), await self._call.details(), server.peer_id, span)
        if reply.WhichOneof("kind") == "failure":
            codes = {code.value[0]: code for code in grpc.StatusCode}
            status = codes.get(reply.failure.status, grpc.StatusCode.UNKNOWN)
            raise from_status(status, reply.failure.message, server.peer_id, span)
        if reply.WhichOneof("kind") != kind:
            raise BadReply(f"server {server.short_id} answered out of turn", server.peer_id, span)
        return reply


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
