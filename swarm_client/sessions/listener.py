"""Reads what the hops of a chain send to the client, and decides when their silence is a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from swarm_client.core.background import now_s
from swarm_client.sessions.call import SessionCall
from swarm_client.swarm.swarm import Swarm
from swarm_client.swarm.watchdog import Stalled, Watchdog
from swarm_client.transport.hops import BlockAnswer, HopEvent, HopOutput, HopSession, Inbox, Trouble
from swarm_protocol.errors import AccessDenied, BadReply, PeerBusy, PeerError, PeerUnavailable, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import FIRST_STEP, MAX_UNTAKEN

_TIMES_WAITING = 4  # the allowance for later batches, as a multiple of the longest queue while the step waited
_SPARE_BATCHES = 16  # batches that are allowed for beside that
_STRANGER_FACTOR = 4.0  # how many times its limit a server is believed that reports work, but has not answered yet
_ALMOST = 0.9  # the fraction of a time limit that counts as all of it, because clocks differ slightly
_MAX_REFUSALS = 3  # the limit on one call's steps that are refused by servers because of the server before
Failures = Mapping[HopSession, SwarmError]


class ChainListener:
    """The receiver of answers from one chain's hops, which also finds hops that must be replaced.

    Attributes:
        progress_s: the time at which the call last made progress.
        refused: the number of the step that the first hop has refused; None if there is none.
    """

    def __init__(
        self,
        hops: Sequence[HopSession],
        swarm: Swarm,
        inbox: Inbox,
        on_answer: Callable[[], None],
        on_other: Callable[[HopEvent], None],
    ) -> None:
        """Set up the listener.

        Args:
            on_answer: called when the outputs of a step have arrived.
            on_other: called with events of hops that are not in the chain.
        """
        self._hops = hops
        self._swarm = swarm
        self._inbox = inbox
        self._on_answer = on_answer
        self._on_other = on_other
        self._probing: asyncio.Task[None] | None = None
        self._probed_s = 0.0
        self._watchdog = Watchdog(swarm.config)
        self._relayed: set[tuple[int, int, int]] = set()  # hop, route and step of each answer relayed in this call
        self.progress_s = 0.0
        self.refused: int | None = None

    def made_progress(self) -> None:
        self.progress_s = now_s()
        self.forget_refusal()

    def forget_refusal(self) -> None:
        self.refused = None

    def end_call(self) -> None:
        self._relayed.clear()
        if self._probing is not None:
            self._probing.cancel()

    async def next_event(self, call: SessionCall) -> HopEvent:
        """Wait for and return the next event. If the call makes no progress for a while, ask all hops for theirs.

        Raises whatever asking them raised that is no failure of a hop.
        """
        after_s = self._swarm.config.timeouts.probe_after_s
        while True:
            event = None
            with suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    event = await self._inbox.get()
            is_asking = self._probing is not None and not self._probing.done()
            if not is_asking and (event is None or now_s() - max(self.progress_s, self._probed_s) > after_s):
                self._probed_s = now_s()
                if self._probing is not None and not self._probing.cancelled():
                    self._probing.result()  # an unexpected error would come again, and the call wait for ever
                self._probing = asyncio.ensure_future(self._probe(call, list(self._hops)))
            if event is not None:
                return event

    async def _probe(self, call: SessionCall, hops: list[HopSession]) -> None:
        """Put trouble into the inbox for hops that do not answer, or that have their input and make no progress.

        A hop's claimed progress counts only up to steps that it was sent, so that claims cannot go on without end.
        """
        asked_s = now_s()
        results = await asyncio.gather(*map(self._ask, hops), return_exceptions=True)
        said: dict[HopSession, pb.SessionProgress] = {}
        numbers: list[int] = []
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, SwarmError):
                raise result  # a cancellation if the client is closing
            if isinstance(result, SwarmError):
                self._inbox.put_nowait(Trouble(hop.number, None, result))
                return  # the first hop that has failed is the one to replace
            if result is not None:
                said[hop] = result
                numbers.append(self._take_progress(hop, result, call, asked_s))
        if hops and len(said) == len(hops):
            num_left = [_num_left(hop, call, number) for hop, number in zip(hops, numbers, strict=True)]
            index = _late_hop(num_left)
            # If all hops have finished, the last one has not sent its outputs.
            late, number = (hops[-1], call.answered) if index is None else (hops[index], numbers[index])
            self._check_time(call, late, number, said)

    def _take_progress(self, hop: HopSession, said: pb.SessionProgress, call: SessionCall, asked_s: float) -> int:
        """Record the progress that the hop claimed when it was asked. Return it as the number of a sent step."""
        self._swarm.progress.probed(hop.hop.server.peer_id, said, now_s())
        number = max((n for n in _numbers_to(hop, call) if n <= said.number), default=0)
        if hop.advance(number):
            self.progress_s = max(self.progress_s, asked_s)
        if said.num_waiting:
            # Later, shorter prompts may go first, and each such stream may bring as much work as this call has.
            num_left = sum(step.number > number for step in call.steps)
            most = _TIMES_WAITING * said.num_waiting * max(1, num_left)
            hop.expect_after(said.num_batches, most + _SPARE_BATCHES)
        else:
            hop.expect_nothing()
        return number

    async def _ask(self, hop: HopSession) -> pb.SessionProgress | None:
        """Ask for the hop's progress. Return None if it is unknown, but the hop was heard or this client was late.

        None is accepted only up to ``step_timeout_s``: a server may answer other sessions and ignore this one.

        Raises:
            SwarmError: the hop has failed.
        """
        asked_s, timeout_s = now_s(), self._swarm.config.timeouts.probe_s
        try:
            return await hop.progress(timeout_s=timeout_s, work=True)
        except PeerUnavailable:
            was_heard = self._swarm.progress.heard_s(hop.hop.server.peer_id) >= asked_s
            is_late = now_s() - asked_s >= _ALMOST * timeout_s
            if self._silent_s > self._swarm.config.step_timeout_s:
                raise
            if is_late and (was_heard or self._swarm.lateness.awake_s(asked_s) < _ALMOST * timeout_s):
                return None
            raise

    def _check_time(
        self, call: SessionCall, hop: HopSession, number: int, said: Mapping[HopSession, pb.SessionProgress]
    ) -> None:
        """Put trouble into the inbox if the hop has had its input for too long and another server can take over."""
        index = self._hops.index(hop) if hop in self._hops else 0
        before = self._hops[index - 1] if index else None
        allowed_s = self._allowed_s(call, hop, number, before)
        if self._silent_s <= allowed_s:
            return
        if any(self._computes(each, progress, allowed_s) for each, progress in said.items()):
            return  # earlier hops do not compute until this hop has taken their outputs
        late = hop if before is None else self._to_blame(call, hop, before)
        who = late.hop.server
        if self._has_worked(late):
            self._swarm.alarms.add(who.peer_id, now_s())
        reason = f"server {who.short_id} did not finish a step within {allowed_s:.3g} s"
        error = Stalled(reason, who.peer_id, late.span, self.progress_s)
        self._inbox.put_nowait(Trouble(late.number, None, error))

    def _allowed_s(self, call: SessionCall, hop: HopSession, number: int, before: HopSession | None) -> float:
        """Return how long the hop may go without progress after the step ``number``."""
        server = hop.hop.server
        num_alarms = self._swarm.alarms.num_others(server.peer_id, now_s())
        rtt_s = self._swarm.costs().rtts_s.get(server.peer_id, 0.0)
        lines = [self._swarm.links.bytes_per_s(None if before is None else before.hop.server, server)]
        if hop in self._hops[-1:]:  # the hop's outputs may be on their way
            lines.append(self._swarm.links.bytes_per_s(server, None))
        allowed_s = max(self._watchdog.allowed_s(hop, number, call.steps, rtt_s, num_alarms, line) for line in lines)
        return allowed_s if self._swarm.can_replace(hop.span, server.peer_id) else self._swarm.config.step_timeout_s

    def _to_blame(self, call: SessionCall, hop: HopSession, before: HopSession) -> HopSession:
        """Return which of two hops to replace: ``before`` claims to have sent the input, and ``hop`` does nothing."""
        is_less_known = self._has_worked(hop) and not self._has_worked(before)
        late = before if is_less_known or before.doubted == call.first_number else hop
        before.doubt(call.first_number)
        return late

    @property
    def _silent_s(self) -> float:
        """Return the seconds without progress of the call, but for those in which this client itself could not run."""
        return self._swarm.lateness.awake_s(self.progress_s)

    def _computes(self, hop: HopSession, said: pb.SessionProgress, allowed_s: float) -> bool:
        """Return whether the hop's server is slow but not stalled: it works on batches that come before the step.

        The only evidence is the server's own report. A report counts only while the server has ended no more batches
        than can have come before, and only for a limited time. This time is shorter for a server without an answer yet.
        """
        if hop.due_batches is None or said.num_batches > hop.due_batches:
            return False
        believed_s = self._swarm.config.step_timeout_s
        peer_id = hop.hop.server.peer_id
        if not self._swarm.progress.has_answered(peer_id):
            believed_s = min(believed_s, _STRANGER_FACTOR * allowed_s)
        grew_s = self._swarm.progress.grew_s(peer_id)
        return self._silent_s <= believed_s and self._swarm.lateness.awake_s(grew_s) <= allowed_s

    def _has_worked(self, hop: HopSession) -> bool:
        return self._swarm.has_worked(hop.hop.server.peer_id)

    def handle(self, event: HopEvent, call: SessionCall) -> Failures:
        """Take an event. Return the hops that must be replaced, each with the reason.

        Raises:
            SwarmError: an error that the user must see.
        """
        index = next((i for i, hop in enumerate(self._hops) if hop.number == event.hop), None)
        if index is None:
            self._on_other(event)
        elif isinstance(event, Trouble):
            return self._handle_trouble(event, index, call)
        elif isinstance(event, BlockAnswer):
            return self._take_block_output(event, self._hops[index], call)
        elif isinstance(event, HopOutput) and event.relay:
            if index + 1 < len(self._hops) and event.route == self._hops[index].route:
                return self._relay(event, self._hops[index], self._hops[index + 1], call)
        elif isinstance(event, HopOutput) and index == len(self._hops) - 1:
            return self._take_output(event, self._hops[index], call)
        return {}

    def _handle_trouble(self, event: Trouble, index: int, call: SessionCall) -> Failures:
        hop, error = self._hops[index], event.error
        if isinstance(error, Stalled) and self.progress_s > error.since_s:
            return {}  # the hop has made progress at the last moment
        if event.step is None or event.step < FIRST_STEP:  # the hop is gone, or refuses a replay
            if isinstance(error, AccessDenied):
                raise error
            return {hop: error}
        if event.step <= call.answered:  # its outputs have arrived already
            return {}
        if index == 0 and not call.outputs:  # if it is the call's first step, nothing was computed
            self.refused = event.step
        if isinstance(error, PeerBusy):
            return {hop: error}
        if index == 0:  # the input is the client's own
            raise error
        if not hop.refuse(event.step):
            return {}
        return self._choose_wrong(hop, self._hops[index - 1], error, call)

    @staticmethod
    def _choose_wrong(hop: HopSession, before: HopSession, error: SwarmError, call: SessionCall) -> Failures:
        """Return the hops to replace when ``hop`` refuses what ``before`` sent on: either of the two is wrong."""
        if call.count_refusal() > _MAX_REFUSALS:
            raise error
        server = before.hop.server
        reason = f"server {server.short_id} sent on what is wrong: {error}"
        errors: dict[HopSession, SwarmError] = {before: BadReply(reason, server.peer_id, before.span)}
        if call.num_refusals > 1:
            errors[hop] = PeerError(str(error), hop.hop.server.peer_id, hop.span)
        return errors

    def _relay(self, answer: HopOutput, sender: HopSession, to: HopSession, call: SessionCall) -> Failures:
        step = to.replayed.get(answer.step) or call.step(answer.step)
        if step is None:
            return {}
        ours, theirs = step.message.hidden, answer.hidden
        shape = list(ours.shape)
        if len(shape) == 4 and shape[2] - 1 <= sender.span.end:  # additions go on to blocks that need them
            del shape[2]
        if theirs is None or (theirs.header.dtype, list(theirs.header.shape)) != (ours.dtype, shape):
            return _bad_reply(sender, f"server {sender.hop.server.short_id} answered another shape")
        relayed = sender.number, answer.route, answer.step
        if relayed not in self._relayed:  # once: a server that repeats itself makes no progress
            self._relayed.add(relayed)
            self.progress_s = now_s()
        onward = step.with_hidden(theirs)
        to.post(onward.message, onward.parts)
        return {}

    def _take_block_output(self, answer: BlockAnswer, hop: HopSession, call: SessionCall) -> Failures:
        step = call.step(answer.step)
        if step is None or answer.block not in call.watched:
            return {}
        if answer.block not in hop.span:
            return _bad_reply(hop, f"server {hop.hop.server.short_id} answered for block {answer.block}")
        like = call.inputs.hidden
        shape = like.shape[0], step.end - step.start, like.shape[2]
        if (answer.block, step.number) not in call.block_outputs:
            self.progress_s = now_s()
        try:
            call.block_outputs[answer.block, step.number] = answer.hidden.decode(shape, like.dtype)
        except BadReply as error:
            return _bad_reply(hop, str(error))
        return {}

    def _take_output(self, answer: HopOutput, last: HopSession, call: SessionCall) -> Failures:
        step = call.step(answer.step)
        if step is None or step.number in call.outputs:
            return {}
        like, num_wanted = call.inputs.hidden, step.message.outputs_wanted
        if num_wanted and answer.hidden is None:
            return _bad_reply(last, f"server {last.hop.server.short_id} answered nothing")
        output = None
        if num_wanted and answer.hidden is not None:
            try:
                output = answer.hidden.decode((like.shape[0], num_wanted, like.shape[2]), like.dtype)
            except BadReply as error:
                return _bad_reply(last, str(error))
        call.outputs[step.number] = output
        self._watchdog.answered(now_s() - self.progress_s)
        self._swarm.progress.waits(last.hop.server.peer_id, last.queue_s, now_s())
        self.progress_s = now_s()
        for hop in self._hops:
            self._swarm.progress.answered(hop.hop.server.peer_id, now_s())
            hop.accept(step.number)
        self._on_answer()
        return {}


def _numbers_to(hop: HopSession, call: SessionCall) -> set[int]:
    """Return the numbers of all steps that the hop gets: those that replay earlier positions, and the call's own."""
    return {*hop.replayed, *(step.number for step in call.steps)}


def _num_left(hop: HopSession, call: SessionCall, number: int) -> int:
    """Return how many steps the hop has yet to do after the step ``number``."""
    return sum(n > number for n in _numbers_to(hop, call))


def _late_hop(num_left: Sequence[int]) -> int | None:
    """Return the index of the hop that the other hops wait for; None if all have finished.

    The late hop is the first one that has not finished. An exception: a hop may have to pause until the next hop has
    taken its outputs; then the next hop is late.

    Args:
        num_left: how many steps each hop has yet to do, including those of a replay.
    """
    late = next((i for i, num in enumerate(num_left) if num), None)
    # A server computes a step before it waits until it may send the step on, so it pauses MAX_UNTAKEN + 1 steps ahead.
    while late is not None and late + 1 < len(num_left) and num_left[late + 1] - num_left[late] > MAX_UNTAKEN:
        late += 1
    return late


def _bad_reply(hop: HopSession, reason: str) -> Failures:
    return {hop: BadReply(reason, hop.hop.server.peer_id, hop.span)}
