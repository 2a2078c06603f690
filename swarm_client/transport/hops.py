"""One server's part of a session, as the client sees it, and the events that servers send."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm_client.core.config import Timeouts
from swarm_client.routing.routing import Hop
from swarm_client.transport.answers import require_readable
from swarm_client.transport.bundle import StepBundle
from swarm_client.transport.grpc_calls import GrpcStream, bad_reply
from swarm_client.transport.steps import OutgoingStep, in_messages
from swarm_client.transport.wire_tensor import WireTensor
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import BadReply, PeerUnavailable, SwarmError
from swarm_protocol.failures import undone_on_error
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.bundling import may_be_bundled
from swarm_protocol.wire.constants import PART_BYTES
from swarm_protocol.wire.session_keys import push_key_of
from swarm_protocol.wire.status import from_status

if TYPE_CHECKING:
    from swarm_client.transport.transport import ServerConnection

_MAX_UNREAD_BYTES = 64 * PART_BYTES  # beyond this, messages wait at the servers until the client has read some
_MAX_UNREAD = 4096  # beyond this, a hop on a shared stream is lost: other sessions on the stream cannot wait


@dataclass(frozen=True)
class HopOutput:
    """A hop's outputs of one step. ``hidden`` is None if no outputs were wanted.

    ``relay``: the client must pass the outputs on to the next hop, if the hop's ``route`` is still this one.
    """

    hop: int
    step: int
    hidden: WireTensor | None
    relay: bool
    route: int = 0


@dataclass(frozen=True)
class BlockAnswer:
    """The output of one of a hop's blocks in a step."""

    hop: int
    step: int
    block: int
    hidden: WireTensor


@dataclass(frozen=True)
class Trouble:
    """A hop's failure, or its refusal of one step."""

    hop: int
    step: int | None  # None: the hop is gone
    error: SwarmError


@dataclass(frozen=True)
class Leaving:
    """A server's announcement that it wants to leave: the session should move to another server."""

    hop: int


HopEvent = HopOutput | BlockAnswer | Trouble | Leaving


class Inbox(asyncio.Queue[HopEvent]):
    """The queue of events from a session's hops. The client reads the queue only during calls: outputs of a replay that
    come between calls are relayed in the next call.

    Attributes:
        on_leaving: called at once when a server wants to leave.
        room: set while the unread events are small enough for more to be read from servers.
    """

    def __init__(self, on_leaving: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.on_leaving = on_leaving
        self.room = asyncio.Event()
        self.room.set()
        self._unread_bytes = 0

    def _put(self, event: HopEvent) -> None:
        super()._put(event)
        self._count(_size_bytes(event))

    def _get(self) -> HopEvent:
        event = super()._get()
        self._count(-_size_bytes(event))
        return event

    def _count(self, size_bytes: int) -> None:
        self._unread_bytes += size_bytes
        if self._unread_bytes <= _MAX_UNREAD_BYTES:
            self.room.set()
        else:
            self.room.clear()


def _size_bytes(event: HopEvent) -> int:
    """Return the size of the event, including the message that it came in."""
    hidden = event.hidden if isinstance(event, HopOutput | BlockAnswer) else None
    return PART_BYTES + (0 if hidden is None else hidden.header.size_bytes)


class HopSession:
    """One server's part of a session: an open stream that is read all the time and written to in the background.

    Attributes:
        number: distinguishes the hops of a session.
        session_key: the key by which this client's calls name the session.
        changed_number: the rows were opened with the changes of steps up to this number applied.
        replayed: the steps that replay earlier positions to the server, by number.
        seen_number: the server's progress at the last probe, as the number of a step that it was sent.
        doubted: the first step number of the call in which the next hop seemed to stall; 0 if there is none.
        refused: the step that the server has refused because of what the server before it sent.
        due_batches: the server's count of ended batches by which the next step must be done; None: the server has not
            said that it has that step.
        num_active: the sessions that the server has computed for recently, by its last report; 0: no report.
        queue_s: how long a step would wait at the server, by its last report; None: no report.
        next_number: the hop that receives the outputs; None: the client. ``codec``: the codec of these outputs.
        input_codec: the codec in which the client sends to the server; None: the client has sent nothing.
        route: the number of reroutes so far; ``held``: the server pauses until the next reroute.
    """

    def __init__(
        self,
        number: int,
        hop: Hop,
        stream: GrpcStream[pb.SessionRequest, pb.SessionReply],
        inbox: Inbox,
        request: pb.Open,
        server: ServerConnection,
        timeouts: Timeouts,
        bundle: StepBundle | None = None,
    ) -> None:
        """Prepare the hop; ``open`` opens it. ``bundle`` carries small steps and answers, which else use ``stream``."""
        self.number = number
        self.hop = hop
        self.max_step_tokens = 0
        self.session_key = request.session_key
        self.changed_number = request.changed_number
        self.replayed: dict[int, OutgoingStep] = {}
        self.seen_number = 0
        self.due_batches: int | None = None
        self._first_batches: int | None = None  # the server's count when it first said that it has that step
        self.doubted = 0
        self.refused: int | None = None
        self.num_active = 0
        self.queue_s: float | None = None
        self.next_number: int | None = None
        self.codec = request.codec
        self.input_codec: pb.Codec | None = None
        self.route = 0
        self.leaving = False
        self.held = False
        self.ended = False
        self._server, self._timeouts = server, timeouts
        self._stream, self._bundle = stream, bundle
        self._inbox = inbox
        self._reading: asyncio.Task[Any] | None = None
        self._writing = asyncio.Lock()  # gRPC breaks a call if two messages are written at once
        self._outbox: deque[tuple[pb.Step, Sequence[bytes]]] = deque()
        self._posting: asyncio.Task[Any] | None = None

    @property
    def span(self) -> Span:
        return self.hop.span

    @property
    def gone(self) -> bool:
        """Return whether the stream has ended."""
        return self.ended or self._reading is None or self._reading.done()

    async def open(self, request: pb.Open, timeout_s: float) -> None:
        """Open the session on the server. Raise SwarmError if the server refuses, or does not answer in time."""
        with undone_on_error(self._stream.cancel):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._stream.write(pb.SessionRequest(open=request))
                    reply = await self._stream.read()
            except TimeoutError:
                server = self.hop.server
                reason = f"server {server.short_id} did not answer within {timeout_s:g} s"
                raise PeerUnavailable(reason, server.peer_id, self.span) from None
            if reply.WhichOneof("kind") != "opened":
                raise self._out_of_turn()
        self.max_step_tokens = max(1, reply.opened.max_step_tokens)
        self.queue_s = reply.opened.queue_s if reply.opened.HasField("queue_s") else None
        if self._bundle is not None and self._bundle.ended:  # the server knows, and answers on the session's stream
            self._bundle = None
        elif self._bundle is not None:
            self._bundle.join(self)
        self._reading = asyncio.ensure_future(self._read_all())

    def link_to(self, to: HopSession | None) -> None:
        """Record the hop that the server was opened to send its outputs to; None stands for the client."""
        self.next_number = None if to is None else to.number

    def codec_from_client(self, choose: Callable[[], pb.Codec]) -> pb.Codec:
        """Return the codec in which the client sends to the server; ``choose`` returns it at the first use."""
        if self.input_codec is None:
            self.input_codec = choose()
        return self.input_codec

    def remember(self, replayed: dict[int, OutgoingStep]) -> None:
        """Keep the steps that replay earlier positions to the server, by number."""
        self.replayed = replayed

    def advance(self, number: int) -> bool:
        """Record that the server has done the steps up to ``number``. Return whether that is progress."""
        if number <= self.seen_number:
            return False
        self.seen_number = number
        self.expect_nothing()
        return True

    def expect_after(self, num_batches: int, most: int) -> None:
        """Record that the server has the next step, after ``num_batches`` batches; ``most`` others may come first.

        If the server reports several times on one step, the first ``num_batches`` and the largest ``most`` count: in a
        burst of prompts, few others wait at first, and many a moment later.
        """
        if self._first_batches is None:
            self._first_batches = num_batches
        self.due_batches = max(self.due_batches or 0, self._first_batches + most)

    def expect_nothing(self) -> None:
        """Forget the expected count of batches, because the server has not reported that it has the next step."""
        self.due_batches = self._first_batches = None

    def doubt(self, first_number: int) -> None:
        """Record that the next hop seemed to stall in the call that begins with this step."""
        self.doubted = first_number

    def refuse(self, step: int) -> bool:
        """Record that the server refused the step. Return False if an earlier refusal is the reason."""
        if self.refused is not None and step > self.refused:
            return False
        self.refused = step
        return True

    def accept(self, step: int) -> None:
        """Forget the refusal of the step, because its outputs have arrived."""
        if self.refused == step:
            self.refused = None

    def post(self, step: pb.Step, parts: Sequence[bytes], is_alone: bool = False) -> None:
        """Send a step in the background, after the steps posted before; put errors into the inbox as trouble.

        ``is_alone``: all earlier steps were answered.
        """
        # Set for this server only: steps that are sent again, or to others, may follow unanswered ones.
        step.settled = is_alone
        if is_alone and self._bundle is not None and not parts and may_be_bundled(step):
            self._bundle.post(self, step)
            return
        self._outbox.append((step, parts))
        if self._posting is None or self._posting.done():
            self._posting = asyncio.ensure_future(self._post_all())

    def unpost(self) -> None:
        """Drop the steps that are not sent yet."""
        self._outbox.clear()

    async def send(self, step: pb.Step, parts: Sequence[bytes]) -> None:
        """Send a step and the further parts of its hidden states."""
        async with self._writing:
            await self._stream.write(pb.SessionRequest(step=step))
            for part in parts:
                await self._stream.write(pb.SessionRequest(more=part))

    async def close(self) -> None:
        """End the session on the server without raising. The reader ends with the stream; it must not be cancelled."""
        if self.held:  # a held server would not read the message
            self.abandon()
            return
        self._end()
        try:
            async with asyncio.timeout(self._timeouts.close_s), self._writing:
                await self._stream.write(pb.SessionRequest(close=pb.Close()))
                await self._stream.done_writing()
        except (TimeoutError, SwarmError, asyncio.CancelledError):
            self._stream.cancel()

    def abandon(self) -> None:
        """End the stream at once, because the server is believed to be gone."""
        self._end()
        self._stream.cancel()

    def _end(self) -> None:
        self.ended = True
        self._outbox.clear()
        self._inbox.room.set()  # wakes the reader, which then sees the end
        if self._bundle is not None:
            self._bundle.leave(self)

    def bundled_reply(self, reply: pb.SessionReply) -> None:
        """Handle an answer from the bundle."""
        hidden = WireTensor(reply.output.hidden) if reply.output.HasField("hidden") else None
        try:
            if reply.WhichOneof("kind") not in ("output", "failure") or not may_be_bundled(reply):
                raise self._out_of_turn()
            if hidden is not None:
                require_readable(hidden.header, self.hop.server, self.hop.span)
                if hidden.header.size_bytes != len(hidden.header.data):
                    raise self._out_of_turn()
            if self._inbox.qsize() >= _MAX_UNREAD:
                raise self._out_of_turn()
            self._inbox.put_nowait(self._event(reply, hidden))
        except SwarmError as error:
            if self._bundle is not None:
                self._bundle.leave(self)
            self._lost(error)

    def bundle_lost(self, error: SwarmError) -> None:
        """Handle the loss of the bundle, and perhaps of an answer."""
        self._bundle = None
        self._lost(error)

    async def progress(
        self, hold: bool = False, timeout_s: float | None = None, work: bool = False
    ) -> pb.SessionProgress:
        """Return the server's progress. ``hold``: pause it until ``reroute``; ``work``: include its work for others."""
        request = pb.ProgressRequest(session_key=self.session_key, hold=hold, work=work)
        self.held |= hold
        return await self._server.progress(request, self.span, timeout_s or self._timeouts.open_s)

    async def reroute(self, to: HopSession, resend: Sequence[pb.Step], codec: pb.Codec) -> None:
        """Send outputs to another hop in this codec from now on, beginning with those of the steps in ``resend``."""
        self.route += 1  # counted even if the call fails: the server may have received it
        first = pb.RerouteRequest(session_key=self.session_key, next=to.as_next(codec), route=self.route)
        more = [pb.RerouteRequest(resend=steps) for steps in in_messages(resend)]
        await self._server.reroute([first, *more], self.span, self._timeouts.open_s)
        self.held = False
        self.next_number, self.codec = to.number, codec

    async def copy(self, to: HopSession, timeout_s: float) -> None:
        """Copy all keys and values, and those of every later step, to another session."""
        request = pb.CopyRequest(session_key=self.session_key, to=to.as_next())
        await self._server.copy(request, self.span, timeout_s)

    def as_next(self, codec: pb.Codec | None = None) -> pb.NextHop:
        """Return how another server reaches this session. ``codec``: what it sends in; None: as its hop was opened."""
        return next_hop(self.hop.server, self.session_key, codec)

    async def _post_all(self) -> None:
        try:
            while self._outbox:
                step, parts = self._outbox.popleft()
                await self.send(step, parts)
        except SwarmError as error:
            self._lost(error)

    async def _read_all(self) -> None:
        try:
            while True:
                event = await self._read_event()
                if isinstance(event, Leaving):
                    if self.leaving:  # a repeated announcement
                        continue
                    self.leaving = True
                    if self._inbox.on_leaving is not None:
                        self._inbox.on_leaving()
                self._inbox.put_nowait(event)
                await self._inbox.room.wait()
        except SwarmError as error:
            self._lost(error)

    def _lost(self, error: SwarmError) -> None:
        if isinstance(error, BadReply):  # the server would continue
            self._stream.cancel()
        if not self.ended:
            self._inbox.put_nowait(Trouble(self.number, None, error))

    async def _read_event(self) -> HopEvent:
        reply = await self._stream.read()
        kind = reply.WhichOneof("kind")
        if kind == "leaving":
            return Leaving(self.number)
        if kind == "block_output":
            answer = reply.block_output
            return BlockAnswer(self.number, answer.number, answer.block, await self._read_tensor(answer.hidden))
        if kind not in ("output", "failure"):
            raise self._out_of_turn()
        return self._event(
            reply, await self._read_tensor(reply.output.hidden) if reply.output.HasField("hidden") else None
        )

    def _event(self, reply: pb.SessionReply, hidden: WireTensor | None) -> HopOutput | Trouble:
        """Return the event for an output with its hidden states, or for a failure."""
        if reply.HasField("failure"):
            failure = reply.failure
            error = from_status(failure.status, failure.message, self.hop.server.peer_id, self.hop.span)
            return Trouble(self.number, failure.number, error)
        output = reply.output
        self.num_active = output.active_sessions
        self.queue_s = output.queue_s if output.HasField("queue_s") else None
        return HopOutput(self.number, output.number, hidden, output.relay, output.route)

    async def _read_tensor(self, header: pb.Tensor) -> WireTensor:
        require_readable(header, self.hop.server, self.hop.span)
        parts, received = [], len(header.data)
        while received < header.size_bytes:
            reply = await self._stream.read()
            if reply.WhichOneof("kind") != "more" or not reply.more:
                raise self._out_of_turn()
            parts.append(reply.more)
            received += len(reply.more)
        return WireTensor(header, tuple(parts))

    def _out_of_turn(self) -> BadReply:
        return bad_reply(self.hop.server, self.hop.span, "answered out of turn")


def next_hop(server: ServerRecord, session_key: bytes, codec: pb.Codec | None = None) -> pb.NextHop:
    """Return how another server reaches a session on this one. It gets the push key only, not the session's key."""
    return pb.NextHop(peer_id=server.peer_id, push_key=push_key_of(session_key), codec=codec)
