"""One session as peers see it: steps come from the client or previous hop, outputs go to the client or next hop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch

from swarm_protocol.errors import PeerBusy, PeerError, RequestRejected
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput, unstacked
from swarm_protocol.wire.codec import Assembler, counts_on, decode, encode, shown_shape, torch_dtype
from swarm_protocol.wire.constants import FIRST_STEP, MAX_NUMBER_JUMP
from swarm_protocol.wire.printable import printable
from swarm_protocol.wire.session_keys import push_key_of
from swarm_protocol.wire.status import number_of, status_of
from swarm_server.admission.preemption import PARK_S, Claim, Preemption, now_s
from swarm_server.engine.scheduler import Scheduler
from swarm_server.engine.session_state import Crop, HistoryChange, Outcome, RecordPast, Reorder, Session, SessionStep
from swarm_server.kv.kv_cache import NoRoom
from swarm_server.kv.kv_transfer import Stored
from swarm_server.net.push import Pusher
from swarm_server.sessions.parking import Parking
from swarm_server.sessions.replicator import Replicator
from swarm_server.sessions.services import SpanServices
from swarm_server.sessions.step_outputs import StepOutputs

Send = Callable[[list[pb.SessionReply]], Awaitable[None]]
Result = bool | BaseException  # of a step: whether it was not refused, or the error with which the server failed
# Next positions of text that can be decoded together: dtype, codec and size of the hidden states, and whether nobody
# waits for the answers.
StepKind = tuple[int, int, int, bool]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """The way of a session's replies to its client.

    Attributes:
        send: sends the messages of one reply.
        put: sends an output, an encoded ``KeyedReply``, later, together with those of other sessions. Returns False if
            there is no room for it. None: the session's replies are never sent so.
    """

    send: Send
    put: Callable[[bytes], bool] | None = None


class HostedSession:
    """A session that peers use over streams. A refused step leaves it unchanged.

    Attributes:
        client: the client that owns the session.
        key: the client's own key; ``push_key`` is the key for peers that may push steps.
        names: the client's peer id, and which of the client's users the session is for.
        is_background: nobody waits for the session's answers.
    """

    def __init__(
        self,
        services: SpanServices,
        preemption: Preemption,
        claim: Claim,
        client: Caller,
        request: pb.Open,
        session: Session,
        reply: Reply,
    ) -> None:
        self.client = client
        self.key = request.session_key
        self.push_key = push_key_of(request.session_key)
        self.session = session
        self.claim = claim
        self._services = services
        self._preemption = preemption
        self._reply = reply
        self.names = client.peer_id, request.user
        self.is_background = request.is_background
        self._codec = request.codec
        self._next_codec = request.next.codec if request.next.HasField("codec") else request.codec
        self._sent_number = request.sent_number  # outputs of steps up to here are sent to nobody
        self._changed_number = request.changed_number  # rows come with the reorders and crops of steps up to here
        self._last_number = request.last_number or FIRST_STEP
        # The last step's number, and the numbers of positions and rows after it. The session itself may be a step ahead
        # while that step's output is on its way from the compute thread.
        self._done = 0, 0, request.batch_size
        self._turn = asyncio.Lock()  # for one step at a time: steps may come from the client and from the previous hop
        self._computed = asyncio.Event()  # if clear, a step is being computed, which holds the turn
        self._computed.set()
        self._routed = asyncio.Event()  # if clear, nothing is computed or sent until there is another next hop
        self._routed.set()
        self._last_time = now_s()
        self._copier: Replicator | None = None
        self._parking = Parking(services, session, claim)
        if services.offload.is_used:
            claim.park_by(self.park, self._can_park)
        self._rest: asyncio.Task[bool] | None = None  # ends a step that began without a task
        self._is_bundled = bool(request.bundle_key)
        self._row_shape = [1, 1, services.validator.hidden_size]  # of one position's hidden states
        self._pusher = self._pusher_to(request.next, 0) if request.HasField("next") else None

    @property
    def silent_s(self) -> float:
        """Return for how long the session has received nothing, or has waited for a next hop."""
        is_busy = self._turn.locked() and self._routed.is_set()
        return 0.0 if is_busy else now_s() - self._last_time

    @property
    def number(self) -> int:
        """Return the number of the last step."""
        return self._done[0]

    @property
    def scheduler(self) -> Scheduler:
        return self._services.scheduler

    @property
    def _progress(self) -> pb.SessionProgress:
        number, length, batch_size = self._done
        return pb.SessionProgress(number=number, length=length, batch_size=batch_size)

    @property
    def _work(self) -> pb.SessionProgress:
        """Return what ``progress`` adds for ``work``: how far the server is with the work of all sessions."""
        scheduler, counters = self._services.scheduler, self._services.counters
        return pb.SessionProgress(
            computed=counters.blocks_run + counters.batches,
            num_batches=counters.batches,
            num_waiting=0 if self._computed.is_set() else scheduler.num_waiting,
            queue_s=scheduler.queue_s,
        )

    @property
    def closed(self) -> bool:
        """Return whether the session has ended, so that it computes nothing more."""
        return self.claim.closed

    async def announce(self) -> None:
        """Notify the client that the session is open."""
        opened = pb.Opened(
            tokens_left=self._services.budget.tokens_left,
            max_step_tokens=self._services.validator.max_step_tokens,
            queue_s=self._services.scheduler.queue_s,
        )
        await self._reply.send([pb.SessionReply(opened=opened)])

    async def ask_to_move(self) -> None:
        """Ask the client to move the session to another server, because this one leaves."""
        await self._reply.send([pb.SessionReply(leaving=pb.Leaving())])

    # ------------------------------------------------------------ steps

    async def step(self, request: pb.Step, payload: torch.Tensor, on_done: Callable[[], None]) -> bool:
        """Compute the step from its hidden states and send its outputs on, or store what was computed elsewhere.

        A step that has begun is finished even if its stream breaks: the step may arrive again through another stream,
        and must be known then. If a step is refused, the client gets the reason, and the method returns False.

        ``on_done`` is called when the payload is no longer needed.
        """
        self.heard()
        finishing = asyncio.ensure_future(self._finish(request, payload))

        def end(done: asyncio.Task[bool]) -> None:
            _heed(done)
            on_done()

        finishing.add_done_callback(end)
        return await asyncio.shield(finishing)

    async def _finish(self, request: pb.Step, payload: torch.Tensor) -> bool:
        async with self._turn:
            return await self._in_turn(request, payload)

    async def _in_turn(self, request: pb.Step, payload: torch.Tensor, failure: Exception | None = None) -> bool:
        """Do what ``step`` does, while the caller holds the turn. ``failure``: the error of a first attempt."""
        if not self._routed.is_set():
            await self._routed.wait()
        if self.closed or request.number <= self.number:  # the step was there before, through another stream
            return True
        try:
            with self._computing():
                output = await self._compute(request, payload, failure)
            if self.closed:  # its rows may be gone
                return True
            self._done = request.number, self.session.length, self.session.batch_size
        except (RequestRejected, PeerBusy) as error:
            await self.refuse(request.number, error)
            return False
        finally:
            self._last_time = now_s()
        return await self._pass_on(request, output)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._begin_to_compute()
        try:
            yield
        finally:
            self._end_computing(now_s())

    def _begin_to_compute(self) -> None:
        self._computed.clear()
        self.claim.begin()

    def _end_computing(self, time_s: float) -> None:
        self._last_time = time_s
        self.claim.end(self._used_bytes, time_s)
        self._computed.set()

    async def _pass_on(self, request: pb.Step, output: torch.Tensor | None) -> bool:
        """Send what was computed to the client or the next hop, and to a standby."""
        if not self._routed.is_set():
            await self._routed.wait()
        if output is not None:
            await self._send_on(request, output)
        if self._copier is not None:
            await self._copier.follow(request)
        return True

    def _used_bytes(self) -> int:
        return self.session.used_bytes

    # ------------------------------------------------------------ steps that need no task

    @property
    def is_idle(self) -> bool:
        """Return whether the session could begin a step now."""
        return not (self.claim.closed or self._turn.locked() or self.session.is_parked) and self._routed.is_set()

    def begin(self, request: pb.Step, known: Container[StepKind]) -> StepKind | SessionStep | None:
        """Begin a step like ``step``, but without a task. A task would take as long as all else that is done here.

        Return what must be computed: the step, or its kind if it is the next position of text. The caller calls ``end``
        afterwards. Return None, and begin nothing, if the step needs a task: if the session is not idle, or if the step
        was there before, is incomplete, is to be refused, or brings what was computed elsewhere.

        ``known``: the kinds of next positions that have been checked.
        """
        number = request.number
        if not self.is_idle or number <= self._done[0] or request.HasField("stored"):
            return None
        try:
            self.require_number(number)
            begun = self._complete_step(request, known)
        except (RequestRejected, PeerBusy):
            return None
        if begun is None or not acquired_at_once(self._turn):
            return None
        self._begin_to_compute()
        return begun

    def undo_begin(self) -> None:
        """Make the session idle again, because its step cannot be computed now."""
        self._end_computing(now_s())
        self._turn.release()

    def end(self, request: pb.Step, outputs: StepOutputs | Exception, number: int, time_s: float) -> bool:
        """Send the output with this number for a step that has begun. Return False if ``end_later`` must do so.

        ``time_s``: the present time, see ``now_s``.
        """
        self._end_computing(time_s)
        if not self.claim.closed:
            if isinstance(outputs, Exception):
                return False
            self._done = request.number, self.session.length, self.session.batch_size
            if not self._has_put(request, outputs, number):
                return False
        self._turn.release()
        return True

    def end_later(self, request: pb.Step, output: Outcome, on_end: Callable[[Result], None]) -> None:
        """Send the output in a task, or try again to compute the step if there is none; ``on_end`` gets the result."""
        if isinstance(output, torch.Tensor):
            self._rest = asyncio.ensure_future(self._pass_on(request, output))
        else:
            self._rest = asyncio.ensure_future(self._in_turn(request, decode(request.hidden), output))
        self._rest.add_done_callback(partial(self._ended, on_end))

    def _complete_step(self, request: pb.Step, known: Container[StepKind]) -> StepKind | SessionStep | None:
        """Return what ``begin`` does; None if hidden states are incomplete. Raise the error that refuses the step."""
        start = request.start_position
        kind = self._kind_of_next(request, start)
        if kind is not None and kind in known:
            self._services.validator.length(start + 1)
        else:
            hidden = self.start(request)
            if not hidden.complete:
                return None
            if kind is None:
                return self._session_step(request, hidden.tensor())
        if start >= self.session.reserved:
            self._require_room(start, 1, ())
        return kind

    def _kind_of_next(self, request: pb.Step, start: int) -> StepKind | None:
        """Return the kind of a complete step of the next position of text; None for any other step."""
        _, length, batch_size = self._done  # what the session says too, with more look-ups
        if length != start or batch_size != 1 or self.session.layout.slots or request.changes:
            return None
        if request.every_block or request.following_tokens or request.outputs_wanted > 1 or request.HasField("joined"):
            return None
        if request.HasField("attention_mask") and request.attention_mask.values:  # an empty one hides nothing
            return None
        if request.HasField("position_ids") and not counts_on(request.position_ids, start, 1):
            return None
        hidden = request.hidden
        size_bytes = hidden.size_bytes
        if hidden.shape != self._row_shape or len(hidden.data) != size_bytes:
            return None
        return hidden.dtype, hidden.codec, size_bytes, self.is_background

    def _ended(self, on_end: Callable[[Result], None], done: asyncio.Task[bool]) -> None:
        self._rest = None
        self._turn.release()
        on_end(asyncio.CancelledError() if done.cancelled() else done.exception() or done.result())

    def _has_put(self, request: pb.Step, outputs: StepOutputs, number: int) -> bool:
        """Send an output on without waiting; return False if that is not possible."""
        if self._copier is not None or request.every_block or not self._routed.is_set():
            return False
        if request.number <= self._sent_number:
            return True
        try:
            if self._pusher is not None:
                return self._has_pushed(self._pusher, request, outputs, number)
            if self._reply.put is None:
                return False
            entry = outputs.entry(self.key, request, number, self._codec)
            return entry is not None and self._reply.put(entry)
        except Exception:  # a task sends it, or meets the same error
            _logger.exception("an output could not be bundled")
            return False

    def _has_pushed(self, pusher: Pusher, request: pb.Step, outputs: StepOutputs, number: int) -> bool:
        if not request.settled:
            return False
        hidden = pb.Tensor()
        has_parts = outputs.encode_into(hidden, number, self._next_codec)
        if has_parts or not pusher.send_at_once(_with_hidden(request, hidden)):
            return False
        self._services.counters.sent_bytes["push"] += hidden.size_bytes
        return True

    async def _send_on(self, request: pb.Step, output: torch.Tensor) -> None:
        """Send the last block's outputs on, unless they were sent before; then each block's, if they are wanted."""
        if request.number > self._sent_number and not self.closed:
            await self._send(request, output[-1] if request.every_block else output)
        if request.every_block:
            await self._send_block_outputs(request.number, output)

    async def _compute(self, request: pb.Step, payload: torch.Tensor, failure: Exception | None) -> torch.Tensor | None:
        """Return the outputs, or None if they were computed elsewhere. Younger sessions may be preempted."""
        failures = chain([failure], repeat(None))

        async def attempt() -> torch.Tensor | None:
            if (error := next(failures)) is not None:  # at the first attempt only, which has been made already
                raise error
            return await self._try_to_compute(request, payload)

        return await self._preemption.with_room(self.claim, attempt)

    async def _try_to_compute(self, request: pb.Step, payload: torch.Tensor) -> torch.Tensor | None:
        if self.closed:  # it ended while it waited for room, and must not get a promise any more
            raise RequestRejected("the session is closed")
        if self.session.is_parked:
            await self._parking.resume()
            if self.closed:
                raise RequestRejected("the session is closed")
        if request.HasField("stored"):
            changes = self._applicable(request)
            self._require_room(request.start_position, request.stored.num_tokens, changes)
            stored = Stored(request.stored.num_tokens, tuple(request.stored.num_kept), payload)
            adopt = partial(self._services.engine.adopt, self.session, request.start_position, changes, stored)
            await self._services.scheduler.call(adopt, self.client.peer_id)
            self._services.counters.positions["copied"] += self.session.batch_size * stored.num_tokens
            return None
        step = self._session_step(request, payload)
        return await self._services.scheduler.step(self.session, step, *self.names, is_background=self.is_background)

    def _applicable(self, request: pb.Step) -> tuple[HistoryChange, ...]:
        """Return the changes before the step. Raise RequestRejected if its positions do not follow the session's."""
        changes = tuple(self._changes(request)) if request.changes else ()
        if request.start_position > self.session.length:
            raise RequestRejected(
                f"a step begins at position {request.start_position}, but the session has {self.session.length}"
            )
        return changes

    async def refuse(self, number: int, error: RequestRejected | PeerError) -> None:
        """Send the client the reason why the step with this number is refused."""
        self._services.counters.refusals[status_of(error).name] += 1
        failure = pb.Failure(status=number_of(error), message=printable(str(error)), number=number)
        await self._reply.send([pb.SessionReply(failure=failure)])

    def _can_park(self) -> bool:
        return self.is_idle and not self._is_copied and self._parking.is_possible

    @property
    def _is_copied(self) -> bool:
        """Return whether each step is copied to a standby."""
        return self._copier is not None and not self._copier.is_closed

    async def park(self) -> bool:
        """Take the session out of the cache until its next step, if it is idle; return whether it has left."""
        if not self._can_park() or not acquired_at_once(self._turn):
            return False
        last_time, end_s = self._last_time, now_s() + PARK_S

        def stays_idle() -> bool:
            is_wanted = self.closed or self._is_copied or not self._routed.is_set()
            return self._last_time == last_time and now_s() < end_s and not is_wanted

        try:
            return await self._parking.park(stays_idle)
        except PeerBusy:  # the session or the server ends
            return False
        except RuntimeError as error:  # for instance of a GPU without memory
            _logger.warning("a session could not leave the KV cache: %s", error)
            return False
        finally:
            self._turn.release()

    async def close(self) -> None:
        """Stop computing and sending; the session's stored data stays until the engine closes it."""
        self.claim.close()
        self._services.scheduler.forget(self.session)
        self._routed.set()
        self._parking.close()
        if self._copier is not None:
            await self._copier.close()
        if self._pusher is not None:
            await self._pusher.retire()

    def heard(self) -> None:
        """Note that a part of a step has come, so that the session does not count as silent or idle."""
        self._last_time = now_s()
        self.claim.heard()

    def require_number(self, number: int) -> None:
        """Raise RequestRejected if the number is far ahead: the session would ignore all steps with correct numbers."""
        if number > self._done[0] + MAX_NUMBER_JUMP and number > self._last_number + MAX_NUMBER_JUMP:
            raise RequestRejected(
                f"step {number} is far ahead of the session's last one, {self.number}: expected the next number"
            )

    def start(self, step: pb.Step) -> Assembler:
        """Check a step's header before memory is reserved for its payload."""
        validator = self._services.validator
        if step.changes:
            validator.changes(step.changes)
        if step.HasField("stored"):
            validator.length(step.start_position + step.stored.num_tokens)
            return validator.stored(step.stored)
        arriving = validator.new_positions(step.hidden, past=step.start_position)
        batch_size, num_tokens, *_ = arriving.shape
        if num_tokens > 1:  # one position is never too long
            joined = step.joined if step.HasField("joined") else None
            validator.step_tokens(batch_size, num_tokens, joined)
        return arriving

    def _session_step(self, request: pb.Step, payload: torch.Tensor) -> SessionStep:
        """Return the step that the engine computes, for which there is room in the session's promise."""
        changes = self._applicable(request)
        hidden, additions = unstacked(payload)
        validator, (batch_size, num_tokens, _) = self._services.validator, hidden.shape
        mask = positions = joined = None
        if request.HasField("attention_mask") and request.attention_mask.values:  # an empty one hides nothing
            mask = validator.mask(request.attention_mask, batch_size, request.start_position + num_tokens)
        if request.HasField("position_ids") and not counts_on(request.position_ids, request.start_position, num_tokens):
            positions = validator.positions(request.position_ids, batch_size, num_tokens)
        if request.HasField("joined"):
            joined = validator.joined(request.joined, batch_size, num_tokens)
        num_wanted = request.outputs_wanted if request.HasField("outputs_wanted") else num_tokens
        if num_wanted > num_tokens:
            raise RequestRejected(f"{num_wanted} outputs are wanted of a step of {num_tokens} positions")
        if request.every_block and additions is not None:
            raise RequestRejected("every block's output is wanted of a step with additions: expected one or the other")
        self._require_room(request.start_position, num_tokens, changes)
        inputs = BlockInput(hidden, mask, positions, additions=additions, joined=joined)
        num_following = validator.at_most(request.following_tokens)
        return SessionStep(request.start_position, inputs, changes, num_wanted, request.every_block, num_following)

    def _require_room(self, start: int, num_new: int, changes: Sequence[HistoryChange]) -> None:
        """Promise room for new positions. Rows that become copies of other rows share their past positions."""
        if start + num_new <= self.session.reserved:
            return
        reorders = [change.indices for change in changes if isinstance(change, Reorder)]
        rows = reorders[-1] if reorders else range(self.session.batch_size)
        num_different, size_bytes = len(set(rows)), self.session.layout.size_bytes
        self.session.lease.promise(
            num_different * size_bytes(start + num_new) + (len(rows) - num_different) * size_bytes(num_new)
        )

    def _changes(self, request: pb.Step) -> Iterator[HistoryChange]:
        """Yield the step's changes. Leave out reorders and crops that were made before the rows came here."""
        for change in request.changes:
            kind = change.WhichOneof("kind")
            if kind == "record_past":
                yield RecordPast()
            elif kind not in ("reorder", "crop"):
                raise RequestRejected("a change of unknown kind")
            elif request.number <= self._changed_number:
                continue
            elif kind == "crop":
                yield Crop(change.crop.length)
            else:
                yield Reorder(tuple(change.reorder.indices))

    # ------------------------------------------------------------ outputs

    async def _send(self, request: pb.Step, output: torch.Tensor) -> None:
        if self._pusher is not None:
            header, parts = encode(output, self._next_codec)
            self._services.counters.sent_bytes["push"] += header.size_bytes
            await self._pusher.send(_with_hidden(request, header), parts)
            return
        answer = pb.Output()
        parts = StepOutputs(output, 1, self.scheduler).fill(answer, request, self._codec)
        await self._reply_output(answer, parts)

    async def _send_block_outputs(self, number: int, outputs: torch.Tensor) -> None:
        """Send the outputs of each block to the client; ``outputs``: [blocks, batch, tokens, hidden_size]."""
        if self._pusher is None:
            outputs = outputs[:-1]
        for block, output in enumerate(outputs, self.session.blocks.start):
            header, parts = encode(output, self._codec)
            message = pb.SessionReply(block_output=pb.BlockOutput(number=number, block=block, hidden=header))
            await self._reply.send([message, *(pb.SessionReply(more=part) for part in parts)])

    def _pusher_to(self, hop: pb.NextHop, route: int) -> Pusher:
        return Pusher(self._services.neighbours, hop, partial(self._relay, route), self._is_bundled)

    async def _relay(self, route: int, step: pb.Step, parts: list[bytes]) -> None:
        output = pb.Output(number=step.number, hidden=step.hidden, relay=True, route=route)
        await self._reply_output(output, parts)

    async def _reply_output(self, output: pb.Output, parts: list[bytes]) -> None:
        await self._reply.send([pb.SessionReply(output=output), *(pb.SessionReply(more=part) for part in parts)])

    # ------------------------------------------------------------ when another server is gone

    async def progress(self, hold: bool = False, work: bool = False) -> pb.SessionProgress:
        """Return how far the session is.

        Args:
            hold: if True, stop the session there until ``reroute``.
            work: if True, add how far the server is with the work of all sessions.

        Raises:
            RequestRejected: the session has no next hop to wait for.
        """
        if hold:
            if self._pusher is None:
                raise RequestRejected("the session's outputs go to the client: there is no other hop to wait for")
            self._routed.clear()
            await self._pusher.retire()  # drops a step that waits for the old hop
            await self._computed.wait()
        progress = self._progress
        if work:
            progress.MergeFrom(self._work)
        return progress

    async def reroute(
        self, request: pb.RerouteRequest, resend: Sequence[pb.Step], on_sent: Callable[[], None]
    ) -> pb.SessionProgress:
        """Send the kept outputs of these steps, and all later outputs, to another hop.

        ``on_sent`` is called when the steps have been sent, or never will be.

        Raises:
            RequestRejected: the session has not kept the outputs, or the next hop has no address.
        """
        self._services.validator.next_hop(request.next)
        progress = await self.progress(hold=True)
        for step in resend:
            shape = step.hidden.shape
            if len(shape) not in (3, 4) or step.start_position + shape[1] > progress.length or shape[1] < 1:
                shown = shown_shape(step.hidden)
                raise RequestRejected(f"outputs of a step of shape {shown} are not kept: sessions keep positions")
            if not torch_dtype(step.hidden.dtype).is_floating_point:
                raise RequestRejected("outputs are no floating-point tensor: expected float32, bfloat16 or float16")
        self._sent_number = progress.number  # for steps up to here, the client has listed what the next hop needs
        self._pusher = self._pusher_to(request.next, request.route)
        self._next_codec = request.next.codec if request.next.HasField("codec") else self._codec
        resending = asyncio.ensure_future(self._resend(self._pusher, resend))
        resending.add_done_callback(_heed)
        resending.add_done_callback(lambda _done: on_sent())
        return progress

    async def _resend(self, pusher: Pusher, resend: Sequence[pb.Step]) -> None:
        engine = self._services.engine
        try:
            await self._preemption.with_room(self.claim, self._parking.resume)
        except NoRoom:
            self.claim.preempt()
            return
        for step in resend:
            start, end = step.start_position, step.start_position + step.hidden.shape[1]
            read = partial(engine.outputs, self.session, start, end)
            output = await self._services.scheduler.call(read, self.client.peer_id)
            header, parts = encode(output.to("cpu", torch_dtype(step.hidden.dtype)), self._next_codec)
            await pusher.send(_with_hidden(step, header), parts)
            if pusher.retired:  # the new hop is gone too
                return
        if not pusher.retired:
            self._routed.set()

    async def copy(self, to: pb.NextHop) -> pb.SessionProgress:
        """Copy everything, and every later step, to another session; return once that session has caught up.

        Raises:
            RequestRejected: ``to`` is not a session's address. PeerUnavailable: the other server cannot be reached.
            NoRoom: the session is parked, and there is no room for it to come back.
        """
        self._services.validator.next_hop(to)
        if self._copier is not None:
            await self._copier.close()
        await self._preemption.with_room(self.claim, self._parking.resume)
        if self.closed:
            raise RequestRejected("the session is closed")
        self._copier = Replicator(self._services, self.session, to)
        await self._copier.copy_all(self._turn, lambda: self.number)
        return self._progress


def acquired_at_once(lock: asyncio.Lock) -> bool:
    """Acquire the lock if that need not wait; return whether it is acquired."""
    if lock.locked():
        return False
    acquiring = lock.acquire()
    try:
        acquiring.send(None)
    except StopIteration:
        return True
    acquiring.close()  # another caller is about to get it
    return False


def _heed(task: asyncio.Task[Any]) -> None:
    """Mark the task's error as retrieved, so that asyncio does not warn if nobody awaits the task any more."""
    if not task.cancelled():
        task.exception()


def _with_hidden(step: pb.Step, hidden: pb.Tensor) -> pb.Step:
    """Return the same step with other hidden states, for the next hop."""
    return pb.Step(
        number=step.number,
        changes=step.changes,
        start_position=step.start_position,
        hidden=hidden,
        attention_mask=step.attention_mask if step.HasField("attention_mask") else None,
        position_ids=step.position_ids if step.HasField("position_ids") else None,
        outputs_wanted=step.outputs_wanted if step.HasField("outputs_wanted") else None,
        every_block=step.every_block,
        settled=step.settled,
        following_tokens=step.following_tokens,
        joined=step.joined if step.HasField("joined") else None,
    )
