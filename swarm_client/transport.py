"""Speaks gRPC to one server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from swarm_client.background import exact_s
from swarm_client.grpc_errors import translated
from swarm_client.hops import OPEN_TIMEOUT_S, HopSession, Inbox
from swarm_client.routing import Hop
from swarm_client.wire_tensor import Context, WireTensor
from swarm_protocol.codec import Assembler
from swarm_protocol.errors import BadReply, PeerUnavailable, RequestRejected
from swarm_protocol.identity import pinned_channel
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksStub
from swarm_protocol.records import ServerRecord
from swarm_protocol.span import Span
from swarm_protocol.wire import CLIENT_OPTIONS, WIRE_VERSION

CONNECT_TIMEOUT_S = 4.0
PROBE_AFTER_S = 1.0  # without an answer, a server is asked whether it is still there
PROBE_TIMEOUT_S = 3.0
_PINGS = 3


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
        """Round-trip time in seconds: the shortest of a few, since the first ones also connect."""
        rtts_s = []
        async with translated(self.record):
            for _ in range(_PINGS):
                start_s = exact_s()
                await self._stub.Echo(pb.EchoRequest(), timeout=CONNECT_TIMEOUT_S)
                rtts_s.append(exact_s() - start_s)
        return min(rtts_s)

    async def describe(self) -> ServerRecord:
        """What the server says of itself now; raises BadReply if it is no record of this server."""
        async with translated(self.record):
            answer = await self._stub.Describe(pb.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
        try:
            record = ServerRecord.from_proto(answer)
            if record.peer_id != self.record.peer_id:
                raise ValueError(f"it says that it is {record.short_id}")
        except ValueError as error:
            raise BadReply(
                f"server {self.record.short_id} described itself wrongly: {error}", self.record.peer_id
            ) from None
        return record

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
