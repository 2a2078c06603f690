"""The gRPC connection to one server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from math import inf
from typing import Any, Protocol, TypeVar, cast

import grpc

from swarm_client.adapters.snapshots import AdapterPart, AdapterUploader
from swarm_client.core.background import exact_s, now_s
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop
from swarm_client.transport.bundle import StepBundle
from swarm_client.transport.grpc_calls import CallCounter, GrpcStream, bad_reply, translated, unreadable
from swarm_client.transport.hops import HopSession, Inbox
from swarm_client.transport.pass_calls import PassCalls, expected_grads
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import BadReply, CacheMiss, PeerUnavailable, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.shared import result_of
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.span import Span
from swarm_protocol.tunnel.circuit import relay_of
from swarm_protocol.tunnel.dialing import Dialer, first_reached
from swarm_protocol.verification.statements import OutputStatement
from swarm_protocol.wire.adapters import adapter_key
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.codec import parts_of
from swarm_protocol.wire.constants import CLIENT_OPTIONS, WIRE_VERSION

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_PINGS = 3
_ECHO_BYTES = 64 * 1024  # takes a twentieth of a second at 10 Mbit/s
_MOST_ROUNDS = 3  # of measuring a line's rate
_LEAST_S = 1e-5  # the least time that the bytes count as taking
_NEAR_S = 0.02  # a server with a shorter round trip is measured in all rounds
_IDLE_S = 30.0  # a replaced connection is closed after so long without calls


class PassWatch(Protocol):
    """A function that waits for a pass, or gives it up. What comes before the pass, such as uploads, is not watched."""

    async def __call__(self, job: Coroutine[Any, Any, T], /) -> T: ...


async def unwatched(job: Coroutine[Any, Any, T], /) -> T:
    """Wait for a pass as long as the server answers that it is there."""
    return await job


class ServerConnection:
    """A connection to one server of one model."""

    def __init__(
        self,
        record: ServerRecord,
        channel: grpc.aio.Channel,
        config: ClientConfig,
        address: str = "",
        relay_of: Callable[[str], str] = relay_of,
    ) -> None:
        """Use an open channel to ``address``, one of the record's. ``relay_of`` returns the relay of an address."""
        self.record = record
        self.address = address
        self._relay_of = relay_of
        self._channel = channel
        self._stub = CallCounter(ServiceStub(BLOCKS, channel), record)
        self._config, self._timeouts = config, config.timeouts
        self._passes = PassCalls(self._stub, record, config.step_timeout_s)
        self._uploader = AdapterUploader(self._put_adapter)
        self._bundle: asyncio.Task[StepBundle | None] | None = None

    @classmethod
    async def connect(cls, record: ServerRecord, config: ClientConfig, dialer: Dialer) -> ServerConnection:
        """Connect to the server. Raise PeerUnavailable if no address answers, BadReply if a different server does."""

        def connect(address: str) -> Awaitable[grpc.aio.Channel]:
            return dialer.connect(address, record.tls_fingerprint, CLIENT_OPTIONS, config.timeouts.connect_s)

        try:
            address, channel = await first_reached(record.addresses, connect)
        except PeerUnavailable as error:
            reason = f"server {record.short_id} cannot be reached: {error}"
            raise PeerUnavailable(reason, record.peer_id, record.span) from None
        except BadReply as error:
            reason = f"server {record.short_id} is not where it should be: {error}"
            raise BadReply(reason, record.peer_id, record.span) from None
        return cls(record, channel, config, address, dialer.relay_of)

    @property
    def stub(self) -> ServiceStub:
        """Return the server's methods; a call raises PeerUnavailable if the connection is closed."""
        return cast(ServiceStub, self._stub)

    @property
    def relay_id(self) -> str:
        """Return the peer through which the server is reached; empty if there is none (routers do not count)."""
        return self._relay_of(self.address)

    def leads_to(self, record: ServerRecord) -> bool:
        """Return whether this connection still fits a newer record of the server."""
        return self.record.tls_fingerprint == record.tls_fingerprint and self.address in record.addresses

    def renew(self, record: ServerRecord) -> None:
        """Take a newer record of the server, to which this connection still leads."""
        self.record = record

    async def close(self) -> None:
        """Cancel all that is under way."""
        await self._channel.close()

    async def close_when_idle(self) -> None:
        """Close when sessions and passes have ended and no others begin for a while; at once if this is cancelled.

        The stream that sessions share does not count as one: it stays open without sessions.
        """
        start_s = now_s()
        try:
            while (left_s := max(start_s, self._stub.idle_since_s) + _IDLE_S - now_s()) > 0:
                await asyncio.sleep(min(left_s, _IDLE_S))
        finally:
            await self.close()

    async def ping(self) -> float:
        """Return the round-trip time in seconds: the shortest of a few, because the first may include connecting."""
        rtts_s = []
        async with translated(self.record):
            for _ in range(_PINGS):
                start_s = exact_s()
                await self._stub.Echo(pb.EchoRequest(), timeout=self._timeouts.connect_s)
                rtts_s.append(exact_s() - start_s)
        return min(rtts_s)

    async def bytes_per_s(self) -> float:
        """Return the rate of the slower direction. The first round is not timed: it widens TCP's window.

        Other traffic may delay an empty message, and then bytes seem to take no time. Round trips are therefore
        measured at least as often as bytes, and the shortest of each count.
        """
        async with translated(self.record):

            async def timed_s(request: pb.EchoRequest) -> float:
                start_s = exact_s()
                await self._stub.Echo(request, timeout=self._config.step_timeout_s)
                return exact_s() - start_s

            full = pb.EchoRequest(payload=bytes(_ECHO_BYTES), reply_bytes=_ECHO_BYTES)
            await timed_s(full)
            ways = pb.EchoRequest(payload=full.payload), pb.EchoRequest(reply_bytes=_ECHO_BYTES)
            rtt_s = min([await timed_s(pb.EchoRequest()) for _ in range(_PINGS)])
            slower_s, ways_s = inf, [inf, inf]
            for _ in range(_MOST_ROUNDS):  # nearby, a busy processor would look like a slow line
                ways_s = [min(way_s, await timed_s(way)) for way_s, way in zip(ways_s, ways, strict=True)]
                slower_s = max(ways_s)
                if rtt_s >= _NEAR_S and slower_s > rtt_s:
                    break
                rtt_s = min(rtt_s, await timed_s(pb.EchoRequest()))
        return _ECHO_BYTES / max(_LEAST_S, slower_s - rtt_s)

    async def describe(self) -> ServerRecord:
        """Return the server's own current record; raise BadReply if the answer is no record of this server."""
        async with translated(self.record):
            answer = await self._stub.Describe(pb.DescribeRequest(), timeout=self._timeouts.probe_s)
        if answer is None:
            raise unreadable(self.record)
        try:
            record = ServerRecord.from_proto(answer)
            if record.peer_id != self.record.peer_id:
                raise ValueError(f"it says that it is {record.short_id}")
        except ValueError as error:
            raise bad_reply(self.record, None, f"described itself wrongly: {error}") from None
        return record

    async def open(
        self,
        number: int,
        span: Span,
        request: pb.Open,
        inbox: Inbox,
        adapter: AdapterPart | None = None,
        is_bundled: bool = False,
    ) -> HopSession:
        """Open hop ``number`` of a session; its answers go to ``inbox``. Raise PeerBusy if there is no room.

        ``is_bundled``: the session's small steps share a stream with those of other sessions.
        """
        bundle = await self._shared_bundle(span) if is_bundled else None
        opening = pb.Open(contract=self._contract(span), bundle_key=b"" if bundle is None else bundle.key)
        opening.MergeFrom(request)

        async def opened(name: pb.AdapterName | None) -> HopSession:
            if name is not None:
                opening.adapter.CopyFrom(name)
            stream: GrpcStream[pb.SessionRequest, pb.SessionReply] = GrpcStream(self._stub.Session(), self.record, span)
            hop = HopSession(number, Hop(self.record, span), stream, inbox, opening, self, self._timeouts, bundle)
            await hop.open(opening, self._timeouts.open_s + opening.wait_s)
            return hop

        return await self._uploader.use(adapter, span, opened)

    async def _shared_bundle(self, span: Span) -> StepBundle | None:
        """Return the stream that sessions share, after opening it if needed; None if the server does not open it."""
        if self._bundle is None:
            self._bundle = asyncio.ensure_future(self._open_bundle(span))
        return await result_of(self._bundle, self.record.peer_id)

    async def _open_bundle(self, span: Span) -> StepBundle | None:
        try:
            stream: GrpcStream[pb.StepBundle, pb.ReplyBundle] = GrpcStream(
                self._stub.uncounted("Steps"), self.record, span
            )
            return await StepBundle.open(stream, self._timeouts.open_s, self._forget_bundle)
        except (SwarmError, TimeoutError) as error:  # then sessions use streams of their own
            _logger.info("server %s does not bundle steps: %s", self.record.short_id, error)
            self._bundle = None
            return None

    def _forget_bundle(self) -> None:
        self._bundle = None

    async def progress(self, request: pb.ProgressRequest, span: Span, timeout_s: float) -> pb.SessionProgress:
        """Return the progress of one of the server's sessions; raise SessionLost if the server does not know it."""
        return await self._progress(self._stub.Progress(request, timeout=timeout_s), span)

    async def reroute(self, requests: Sequence[pb.RerouteRequest], span: Span, timeout_s: float) -> pb.SessionProgress:
        return await self._progress(self._stub.Reroute(iter(requests), timeout=timeout_s), span, is_written=True)

    async def copy(self, request: pb.CopyRequest, span: Span, timeout_s: float) -> pb.SessionProgress:
        return await self._progress(self._stub.Copy(request, timeout=timeout_s), span)

    async def _progress(self, call: Any, span: Span, *, is_written: bool = False) -> pb.SessionProgress:
        async with translated(self.record, span, call if is_written else None):
            progress: pb.SessionProgress | None = await call
        if progress is None:
            raise unreadable(self.record, span)
        return progress

    async def give_adapter(self, span: Span, adapter: AdapterPart | None) -> None:
        """Send the adapter before the first pass that needs it, unless the server has it."""

        async def nothing(_name: pb.AdapterName | None) -> None: ...

        await self._uploader.use(adapter, span, nothing)

    async def forward(
        self,
        span: Span,
        hidden: WireTensor,
        context: Context,
        watch: PassWatch,
        keep_key: bytes = b"",
        codec: pb.Codec = pb.RAW,
    ) -> tuple[WireTensor, bool]:
        """Return the output in ``codec``, and whether the server keeps what ``backward`` needs under ``keep_key``.

        Raise PeerUnavailable when the server stops answering, and all that ``watch`` raises.
        """

        async def work(name: pb.AdapterName | None) -> tuple[WireTensor, bool]:
            message = self._forward_message(span, hidden, context, name, keep_key=keep_key, codec=codec)
            output, reply = await watch(self._watched(self._passes.forward(span, message, hidden), span))
            return output, reply.kept

        return await self._uploader.use(context.adapter.part(span), span, work)

    async def stated(self, span: Span, inputs: BlockInput, hidden: WireTensor) -> tuple[WireTensor, pb.SignedStatement]:
        """Return the output of one row without an adapter, and the server's signed statement of it; see ``forward``.

        ``hidden``: the hidden states of ``inputs`` in wire form. Raise BadReply if the statement is not about this
        output.
        """
        message = self._forward_message(span, hidden, Context.of(inputs), None, sign=True)

        async def work() -> tuple[WireTensor, pb.SignedStatement]:
            output, reply = await self._passes.forward(span, message, hidden)
            return output, reply.statement

        output, signed = await self._watched(work(), span)
        try:  # in a thread, because it hashes all inputs
            await asyncio.to_thread(_check_statement, signed, self.record, span, inputs, output)
        except ValueError as error:
            raise bad_reply(self.record, span, f"has signed a false statement: {error}") from None
        return output, signed

    async def accuse(self, evidence: pb.Evidence) -> bool:
        """Send evidence that another server answers wrongly. Return whether this server finds it conclusive."""
        async with translated(self.record):
            reply: pb.AccuseReply | None = await self._stub.Accuse(evidence, timeout=self._config.step_timeout_s)
        if reply is None:
            raise unreadable(self.record)
        return reply.is_shown

    async def doubt(self, peer_id: str) -> None:
        """Report that this client has seen answers of another server differ. Old servers ignore the report."""
        async with translated(self.record):
            await self._stub.Doubt(pb.DoubtRequest(peer_id=peer_id), timeout=self._config.step_timeout_s)

    async def backward(
        self,
        span: Span,
        hidden: WireTensor,
        grad: WireTensor,
        context: Context,
        watch: PassWatch,
        kept_key: bytes = b"",
        summand: pb.Summand | None = None,
    ) -> tuple[WireTensor, list[WireTensor] | None]:
        """Return the gradients of ``hidden``, in the codec of ``grad``, and of the adapter's tensors in these blocks.

        The rest is as in ``forward``.

        Args:
            kept_key: the key of a forward pass that the server may have kept; the inputs are sent only if it has not.
            summand: the sum to which the server may add the adapter's gradients; if it does, None is returned for them.
        """
        part = context.adapter.part(span)
        expected, codec = [hidden.header, *expected_grads(part)], grad.header.codec

        async def work(
            first: pb.BackwardRequest, parts: Sequence[bytes] = ()
        ) -> tuple[WireTensor, list[WireTensor] | None]:
            return await watch(self._watched(self._passes.backward(span, first, parts, grad, expected), span))

        async def whole(name: pb.AdapterName | None) -> tuple[WireTensor, list[WireTensor] | None]:
            forward = self._forward_message(span, hidden, context, name)
            return await work(pb.BackwardRequest(forward=forward, codec=codec, summand=summand), hidden.parts)

        if kept_key:
            kept = pb.KeptForward(contract=self._contract(span), key=kept_key)
            with contextlib.suppress(CacheMiss):
                return await work(pb.BackwardRequest(kept=kept, codec=codec, summand=summand))
        return await self._uploader.use(part, span, whole)

    async def take_sum(self, span: Span, request: pb.TakeSum, adapter: AdapterPart) -> list[WireTensor]:
        """Return the sum of an adapter's gradients, which the server then forgets. Raise CacheMiss if it has none."""
        request.contract.CopyFrom(self._contract(span))
        return await self._watched(self._passes.take_sum(span, request, expected_grads(adapter)), span)

    async def _watched(self, work: Coroutine[Any, Any, T], span: Span) -> T:
        """Wait for the work, and ask the server regularly whether it is still there."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=self._timeouts.probe_after_s))[0]:
                try:
                    async with translated(self.record, span):
                        await self._stub.Describe(pb.DescribeRequest(), timeout=self._timeouts.probe_s)
                except SwarmError:
                    if not task.done():  # otherwise the work has ended meanwhile, and its own result or error counts
                        raise
            return task.result()
        finally:
            task.cancel()

    async def _put_adapter(self, data: bytes, span: Span) -> None:
        await self._watched(self._put(data, span), span)

    async def _put(self, data: bytes, span: Span) -> None:
        call = self._stub.PutAdapter(timeout=self._config.step_timeout_s)
        async with translated(self.record, span, call):
            for part in parts_of(data):
                await call.write(pb.PutAdapterRequest(part=part))
            await call.done_writing()
            reply = await call
        if reply is None or reply.key != adapter_key(data):
            raise bad_reply(self.record, span, "understood another adapter")

    def _forward_message(
        self, span: Span, hidden: WireTensor, context: Context, adapter: pb.AdapterName | None, **options: Any
    ) -> pb.Forward:
        return pb.Forward(
            contract=self._contract(span),
            hidden=hidden.header,
            attention_mask=context.attention_mask,
            position_ids=context.position_ids,
            adapter=adapter,
            dropout_seed=context.dropout_seed,
            packed=context.packed,
            joined=context.joined,
            **options,
        )

    def _contract(self, span: Span) -> pb.Contract:
        return pb.Contract(
            wire_version=WIRE_VERSION,
            model=self.record.model,
            revision=self.record.revision,
            blocks=pb.Span(start=span.start, end=span.end),
        )


def _check_statement(
    signed: pb.SignedStatement, server: ServerRecord, span: Span, inputs: BlockInput, output: WireTensor
) -> None:
    """Raise ValueError unless the server has signed that it has computed this output of these inputs."""
    statement = OutputStatement.parse(signed)
    if not statement.is_by(server, span):
        raise ValueError("it is about other blocks, or another kind of server")
    if not statement.is_about(inputs, output.decode(inputs.hidden.shape, inputs.hidden.dtype)[0]):
        raise ValueError("it is about another output")
