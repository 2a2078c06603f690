"""The gRPC service: it validates requests, runs them on the compute thread, and encodes replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.tokens import Role
from swarm_protocol.errors import PeerBusy, PeerMoved, RequestRejected, SessionLost
from swarm_protocol.failures import undone_on_error
from swarm_protocol.net.shares import Caller, address_of
from swarm_protocol.net.tls import peer_of, token_of
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.telemetry.tracing import tracing
from swarm_protocol.verification.statements import Signer
from swarm_protocol.wire.bundling import Outbox
from swarm_protocol.wire.constants import MAX_ECHO_BYTES
from swarm_server.net.arrivals import Arrivals, ByteReservation
from swarm_server.net.incoming import Incoming
from swarm_server.rpc import bundles, passes
from swarm_server.sessions.host import SessionManager
from swarm_server.sessions.reading import StepReader, read_resent
from swarm_server.sessions.services import SpanServices
from swarm_server.sessions.sessions import HostedSession, Reply
from swarm_server.verification.judge import AnswerJudge
from swarm_server.weights.offering import Offering

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
_logger = logging.getLogger(__name__)
_TAKEN_S = 30.0  # how long the client may take to read one part of its answer
_ADMITTED_S = 5.0  # between two checks whether the client of a silent session is still a member


@dataclass(frozen=True)
class CallerChecks:
    """The checks by which a service knows its callers.

    Attributes:
        access: a private swarm's access control.
        origins: see ``address_of``.
    """

    access: AccessControl | None = None
    origins: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def admit(self, context: _Context, role: Role = Role.CLIENT) -> Caller:
        """Return the client. Raise AccessDenied if it may not make calls that require this role."""
        self.membership(context, role)()
        return Caller(peer_of(context.auth_context()), address_of(context.peer(), self.origins))

    def membership(self, context: _Context, role: Role = Role.CLIENT) -> Callable[[], object]:
        """Return a check that raises AccessDenied if the client may not (or no longer) make calls of this role."""
        if self.access is None:
            return lambda: None
        auth = context.auth_context()
        return partial(self.access.require, role, peer_of(auth), token_of(auth))


class BlocksService:
    """The gRPC handlers of a server. They refuse requests before they reserve memory; no request ends the server."""

    def __init__(
        self,
        hosted: Callable[[], SessionManager | None],
        record: Callable[[], pb.ServerRecord],
        idle_timeout_s: float,
        arrivals: Arrivals,
        callers: CallerChecks,
        *,
        signer: Signer,
        judge: AnswerJudge,
        offering: Offering,
    ) -> None:
        """Create the service.

        ``hosted`` returns the sessions of the blocks hosted at present, or None while the server loads other blocks.
        """
        self._hosted = hosted
        self._record = record
        self._idle_timeout_s = idle_timeout_s
        self._arrivals = arrivals
        self._callers = callers
        self._signer = signer
        self._judge = judge
        self._offering = offering
        self._bundles = bundles.ReplyBundles()

    async def Session(self, requests: AsyncIterator[pb.SessionRequest], context: _Context) -> None:
        writing = asyncio.Lock()  # keeps the parts of one output together

        async def reply(replies: list[pb.SessionReply]) -> None:
            await asyncio.shield(write_all(replies))  # gRPC breaks a call if a write is cancelled half-way

        async def write_all(replies: list[pb.SessionReply]) -> None:
            async with writing:
                try:
                    for message in replies:
                        await context.write(message)
                except grpc.aio.BaseError as error:  # the reader of the stream notices too
                    _logger.debug("a client went away: %s", error)

        client = self._callers.admit(context)
        arrivals = self._arrivals.of(client)
        # A refusal closes the stream as well: gRPC's messages cannot be closed while one more is being read ahead.
        async with aclosing(Incoming(requests, arrivals, reads_ahead=True)) as incoming:
            request = await incoming.next()
            if request is None:
                return
            if request.WhichOneof("kind") != "open":
                raise SessionLost("this server does not know the session: it must be opened first")
            host, opening = self._present(), request.open
            bundle = self._bundles.find(opening.bundle_key, client)
            with nullcontext(Reply(reply)) if bundle is None else bundle.joined(opening.session_key, reply) as answer:
                hosted = await host.open(opening, client, answer)
                tracing().event("opened", {"swarm.blocks": str(hosted.session.blocks)})  # the wait for room is over
                try:
                    await hosted.announce()
                    await self._serve(host, hosted, incoming, arrivals, self._callers.membership(context))
                finally:
                    tracing().event("closed", {"swarm.positions": hosted.session.length})
                    await asyncio.shield(host.end(hosted))

    async def Push(self, requests: AsyncIterator[pb.PushRequest], context: _Context) -> None:
        self._callers.admit(context, Role.SERVER)
        admitted = self._callers.membership(context, Role.SERVER)
        async with aclosing(Incoming(requests, self._arrivals, reads_ahead=True)) as incoming:
            request = await incoming.first("push_key")
            hosted = self._sessions().find_pushed(request.push_key)
            arrivals = self._arrivals.of(hosted.client)  # the pushed steps count in the share of the session's client
            # The client blames this stream's sender for one refusal, and would blame the sender's replacement for a
            # second.
            with StepReader(hosted, arrivals, one_refusal=True) as reader:
                while (request := await reader.next(incoming, self._idle_timeout_s)) is not None:
                    admitted()
                    kind = request.WhichOneof("kind")
                    if kind == "step":
                        number, is_settled = request.step.number, request.step.settled
                        await reader.start(request.step)
                    elif kind == "more":
                        await reader.more(request.more)
                    else:
                        raise RequestRejected("a request of unknown kind")
                    if not (reader.is_reading or is_settled):
                        await context.write(pb.PushReply(number=number))

    async def Steps(self, requests: AsyncIterator[pb.StepBundle], context: _Context) -> None:
        client = self._callers.admit(context)
        arrivals = self._arrivals.of(client)
        incoming = Incoming(requests, arrivals)
        first = await incoming.next()
        if first is None:
            return
        outbox = Outbox[pb.KeyedReply](pb.ReplyBundle, "replies", context.write)
        take = bundles.take_for(lambda key: self._sessions().find(key, client), arrivals)
        with self._bundles.opened(first.key, client, outbox) as bundle:
            await context.write(pb.ReplyBundle())
            await bundles.serve(
                incoming,
                outbox,
                take,
                admitted=self._callers.membership(context),
                idle_timeout_s=self._idle_timeout_s,
                is_needed=lambda: bundle.num_sessions > 0,
            )

    async def PushSteps(self, requests: AsyncIterator[pb.PushBundle], context: _Context) -> None:
        self._callers.admit(context, Role.SERVER)
        outbox = Outbox[pb.TakenStep](pb.TakenBundle, "steps", context.write)
        admitted = self._callers.membership(context, Role.SERVER)
        take = bundles.take_pushed(lambda key: self._sessions().find_pushed(key), self._arrivals, outbox)
        incoming = Incoming(requests, self._arrivals)
        await bundles.serve(incoming, outbox, take, admitted=admitted, idle_timeout_s=self._idle_timeout_s)

    async def Progress(self, request: pb.ProgressRequest, context: _Context) -> pb.SessionProgress:
        client = self._callers.admit(context)
        return await self._sessions().find(request.session_key, client).progress(request.hold, request.work)

    async def Reroute(self, requests: AsyncIterator[pb.RerouteRequest], context: _Context) -> pb.SessionProgress:
        client = self._callers.admit(context)
        arrivals = self._arrivals.of(client)
        incoming = Incoming(requests, arrivals)
        first = await incoming.next()
        if first is None:
            raise RequestRejected("a reroute has no messages: expected one with the session's key")
        hosted = self._sessions().find(first.session_key, client)
        reservation = ByteReservation(arrivals)  # closed when the steps have been sent
        with undone_on_error(reservation.close):
            steps = await read_resent(incoming, first, reservation)
            return await hosted.reroute(first, steps, reservation.close)

    async def Copy(self, request: pb.CopyRequest, context: _Context) -> pb.SessionProgress:
        client = self._callers.admit(context)
        return await self._sessions().find(request.session_key, client).copy(request.to)

    async def _serve(
        self,
        host: SessionManager,
        hosted: HostedSession,
        incoming: Incoming,
        arrivals: Arrivals,
        admitted: Callable[[], object],
    ) -> None:
        """Serve until the client closes the session, its stream ends, nothing comes for too long, or the host ends it.

        ``admitted`` raises AccessDenied once the client is no longer a member.
        """
        reading = asyncio.ensure_future(_read(hosted, incoming, arrivals, admitted))
        ending = asyncio.ensure_future(host.ended.wait())
        preempting = asyncio.ensure_future(hosted.claim.until_preempted())
        waiting = [reading, ending, preempting]
        try:
            while not reading.done():
                if ending.done():
                    raise PeerMoved("the server has left these blocks")
                if preempting.done():
                    raise PeerBusy("no room in the KV cache: others need it")
                silent_s = hosted.silent_s
                if silent_s >= self._idle_timeout_s:
                    raise SessionLost(f"the session was closed after {self._idle_timeout_s:g} s without a request")
                admitted()
                timeout_s = min(self._idle_timeout_s - silent_s, _ADMITTED_S)
                await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            reading.result()
        finally:
            await end_tasks(waiting)  # nobody reads the stream any more

    async def PutAdapter(self, requests: AsyncIterator[pb.PutAdapterRequest], context: _Context) -> pb.PutAdapterReply:
        client = self._callers.admit(context)
        incoming = Incoming(requests, self._arrivals.of(client))
        return pb.PutAdapterReply(key=await passes.put_adapter(self._staying(), client, incoming))

    async def Forward(self, requests: AsyncIterator[pb.ForwardRequest], context: _Context) -> None:
        client = self._callers.admit(context)
        incoming = Incoming(requests, self._arrivals.of(client))
        with ExitStack() as request:
            for reply in await passes.forward(self._staying(), client, incoming, request, self._signer):
                await context.write(reply)

    async def Backward(self, requests: AsyncIterator[pb.BackwardRequest], context: _Context) -> None:
        client = self._callers.admit(context, Role.TRAINER)
        incoming = Incoming(requests, self._arrivals.of(client))
        with ExitStack() as request:
            for reply in await passes.backward(self._staying(), client, incoming, request):
                await context.write(reply)

    async def Accuse(self, request: pb.Evidence, context: _Context) -> pb.AccuseReply:
        client = self._callers.admit(context)
        self._present()
        return pb.AccuseReply(is_shown=await self._judge.judge(request, client))

    async def Doubt(self, request: pb.DoubtRequest, context: _Context) -> pb.DoubtReply:
        client = self._callers.admit(context)
        self._present()
        await self._judge.doubt(request.peer_id, client)
        return pb.DoubtReply()

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.ServerRecord:
        self._callers.admit(context)
        return self._record()

    async def Echo(self, request: pb.EchoRequest, context: _Context) -> pb.EchoReply:
        self._callers.admit(context)
        if max(len(request.payload), request.reply_bytes) > MAX_ECHO_BYTES:
            raise RequestRejected(f"an echo is too long: expected at most {MAX_ECHO_BYTES} bytes each way")
        return pb.EchoReply(payload=bytes(request.reply_bytes))

    async def GetOffer(self, request: pb.OfferRequest, context: _Context) -> None:
        client = self._callers.admit(context)
        async with aclosing(self._offering.parts(client)) as parts:
            async for data in parts:
                await _write_soon(context, pb.OfferPart(data=data))

    async def GetPiece(self, request: pb.PieceRequest, context: _Context) -> None:
        client = self._callers.admit(context)
        async with aclosing(self._offering.piece(client, request.sha256)) as parts:
            async for data in parts:
                await _write_soon(context, pb.PiecePart(data=data))

    async def only_request(self, requests: AsyncIterator[Any]) -> Any:
        """Return a call's only message. Raise RequestRejected if there is none, SessionLost if it does not come."""
        request = await Incoming(requests, self._arrivals).next()
        if request is None:
            raise RequestRejected("a call came without its message")
        return request

    def _present(self) -> SessionManager:
        """Return the present host. Raise PeerMoved if there is none at present."""
        host = self._hosted()
        if host is None:
            raise PeerMoved("the server is about to host other blocks")
        return host

    def _staying(self) -> SpanServices:
        """Return the services for a sessionless pass. Raise PeerMoved if there are none, or the server will leave."""
        host = self._present()
        host.require_staying()
        return host.services

    def _sessions(self) -> SessionManager:
        """Return the host, to find a session opened before. Raise SessionLost if there is no host at present."""
        host = self._hosted()
        if host is None:
            raise SessionLost("this server does not know the session")
        return host


async def _write_soon(context: _Context, message: Any) -> None:
    """Write the message. Raise PeerBusy if the other side does not read it in time: others wait for its place."""
    try:
        async with asyncio.timeout(_TAKEN_S):
            await context.write(message)
    except TimeoutError:
        raise PeerBusy(f"the reply was not read within {_TAKEN_S:g} s") from None


async def _read(hosted: HostedSession, incoming: Incoming, arrivals: Arrivals, admitted: Callable[[], object]) -> None:
    with StepReader(hosted, arrivals) as reader:
        while (request := await reader.next(incoming, None)) is not None:
            admitted()
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
