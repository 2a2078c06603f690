"""What the hops of a chain say to the client, and what their silence means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from swarm_client.core.background import now_s
from swarm_client.sessions.call import Call
from swarm_client.swarm.swarm import Swarm
from swarm_client.swarm.watchdog import Stalled, Watchdog
from swarm_client.transport.hops import Answer, BlockAnswer, HopEvent, HopSession, Inbox, Trouble
from swarm_protocol.errors import AccessDenied, BadReply, PeerBusy, PeerError, PeerUnavailable, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import FIRST_STEP, MAX_UNTAKEN

_TIMES_WAITING = 4  # more batches than what waited before a step may end first: of those that came later
_SPARE_BATCHES = 16
_STRANGER_FACTOR = 4.0  # by which a server may take longer that says it computes, and has not answered yet
_ALMOST = 0.9  # of a time limit, by clocks that are not quite the same
_MAX_REFUSALS = 3  # of one call's steps by servers that blame the one before
Failures = Mapping[HopSession, SwarmError]


class Listener:
    """Takes the answers of one chain's hops, and finds those that must be replaced.

    Attributes:
        progress_s: when the call last got on.
        refused: number of a step that the first hop has refused; None: of none.
    """

    def __init__(
        self,
        hops: Sequence[HopSession],
        swarm: Swarm,
        inbox: Inbox,
        on_answer: Callable[[], None],
        on_other: Callable[[HopEvent], None],
    ) -> None:
        """
        Args:
            hops: of the chain, as they are at any time.
            on_answer: called when outputs of a step have come.
            on_other: gets the events of those that are not in the chain.
        """
        self._hops = hops
        self._swarm = swarm
        self._inbox = inbox
        self._on_answer = on_answer
        self._on_other = on_other
        self._probing: asyncio.Task[None] | None = None
        self._probed_s = 0.0
        self._watchdog = Watchdog(swarm.config)
        self._relayed: set[tuple[int, int, int]] = set()  # hop, route and step, in this call
        self.progress_s = 0.0
        self.refused: int | None = None

    def made_progress(self) -> None:
        self.progress_s, self.refused = now_s(), None

    def end_call(self) -> None:
        self._relayed.clear()
        if self._probing is not None:
            self._probing.cancel()

    async def next_event(self, call: Call) -> HopEvent:
        """Asks all hops how far they are when the call does not get on for a while, whatever they say meanwhile."""
        after_s = self._swarm.config.timeouts.probe_after_s
        while True:
            event = None
            with suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    event = await self._inbox.get()
            is_asking = self._probing is not None and not self._probing.done()
            if not is_asking and (event is None or now_s() - max(self.progress_s, self._probed_s) > after_s):
                self._probed_s = now_s()
                self._probing = asyncio.ensure_future(self._probe(call, list(self._hops)))
            if event is not None:
                return event

    async def _probe(self, call: Call, hops: list[HopSession]) -> None:
        """Trouble for hops that do not answer, or that have what they need and do not get on.

        What a hop says of its progress counts as far as it has been sent steps: nobody gets on for ever.
        """
        asked_s = now_s()
        results = await asyncio.gather(*map(self._ask, hops), return_exceptions=True)
        said: dict[HopSession, pb.SessionProgress] = {}
        numbers: list[int] = []
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, SwarmError):
                return  # this client is closing
            if isinstance(result, SwarmError):
                self._inbox.put_nowait(Trouble(hop.number, None, result))
                return  # the first that has failed is the one to replace
            if result is None:
                continue
            self._swarm.progress.probed(hop.hop.server.peer_id, result, now_s())
            number = max((n for n in _numbers(hop, call) if n <= result.number), default=0)
            if number > hop.seen_number:
                hop.seen_number, hop.due_batches = number, None
                self.progress_s = max(self.progress_s, asked_s)
            if not result.num_waiting:
                hop.due_batches = None
            elif hop.due_batches is None:
                # Shorter prompts that come later may go first, each stream of them with as much work as this call has.
                num_left = sum(step.number > number for step in call.steps)
                most = _TIMES_WAITING * result.num_waiting * max(1, num_left)
                hop.due_batches = result.num_batches + most + _SPARE_BATCHES
            said[hop] = result
            numbers.append(number)
        if hops and len(said) == len(hops):
            index = _late_hop([max(number, call.first_number - 1) for number in numbers], call.steps[-1].number)
            # If all have finished, the last one has sent nothing.
            late, number = (hops[-1], call.answered) if index is None else (hops[index], numbers[index])
            self._check_time(call, late, number, said)

    async def _ask(self, hop: HopSession) -> pb.SessionProgress | None:
        """How far the hop is; None if that is not known, but it has been heard meanwhile, or this client was late.

        Not for longer than a step may take: it may answer others and not this session.

        Raises:
            SwarmError: it has failed.
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
        self, call: Call, hop: HopSession, number: int, said: Mapping[HopSession, pb.SessionProgress]
    ) -> None:
        """Trouble if the hop has had what it needs for too long, and somebody else can try."""
        server = hop.hop.server
        num_alarms = self._swarm.alarms.num_others(server.peer_id, now_s())
        rtt_s = self._swarm.costs().rtts_s.get(server.peer_id, 0.0)
        index = self._hops.index(hop) if hop in self._hops else 0
        before = self._hops[index - 1] if index else None
        lines = [self._swarm.links.bytes_per_s(None if before is None else before.hop.server, server)]
        if hop in self._hops[-1:]:  # what it sends may be under way as well
            lines.append(self._swarm.links.bytes_per_s(server, None))
        allowed_s = max(self._watchdog.allowed_s(hop, number, call.steps, rtt_s, num_alarms, line) for line in lines)
        if not self._swarm.can_replace(hop.span, server.peer_id):
            allowed_s = self._swarm.config.step_timeout_s
        if self._silent_s <= allowed_s:
            return
        if any(self._computes(each, progress, allowed_s) for each, progress in said.items()):
            return  # those before do not compute either until it has taken what they have sent on
        late = hop
        if before is not None:  # it says that it has sent on what this one waits for; which of them is to blame?
            is_less_known = self._has_worked(hop) and not self._has_worked(before)
            if is_less_known or before.doubted == call.first_number:
                late = before
            before.doubted = call.first_number
        who = late.hop.server
        if self._has_worked(late):
            self._swarm.alarms.add(who.peer_id, now_s())
        reason = f"server {who.short_id} did not finish a step within {allowed_s:.3g} s"
        error = Stalled(reason, who.peer_id, late.span)
        error.since_s = self.progress_s
        self._inbox.put_nowait(Trouble(late.number, None, error))

    @property
    def _silent_s(self) -> float:
        """How long the call has not got on while this client could hear of it."""
        return self._swarm.lateness.awake_s(self.progress_s)

    def _computes(self, hop: HopSession, said: pb.SessionProgress, allowed_s: float) -> bool:
        """Whether the hop's server is slow, and not stalled: it gets on with what comes before the step that it has.

        By its own words. So they count only as long as it has ended no more batches than can have come before, and not
        for ever: a server that has not answered yet is believed for less time.
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

    def handle(self, event: HopEvent, call: Call) -> Failures:
        """Hops that must be replaced, and why.

        Raises:
            SwarmError: what the user must know.
        """
        index = next((i for i, hop in enumerate(self._hops) if hop.number == event.hop), None)
        if index is None:
            self._on_other(event)
        elif isinstance(event, Trouble):
            return self._handle_trouble(event, index, call)
        elif isinstance(event, BlockAnswer):
            return self._take_block_output(event, self._hops[index], call)
        elif isinstance(event, Answer) and event.relay:
            if index + 1 < len(self._hops) and event.route == self._hops[index].route:
                return self._relay(event, self._hops[index], self._hops[index + 1], call)
        elif isinstance(event, Answer) and index == len(self._hops) - 1:
            return self._take_output(event, self._hops[index], call)
        return {}

    def _handle_trouble(self, event: Trouble, index: int, call: Call) -> Failures:
        hop, error = self._hops[index], event.error
        if isinstance(error, Stalled) and self.progress_s > error.since_s:
            return {}  # it has got on at the last moment
        if event.step is None or event.step < FIRST_STEP:
            if isinstance(error, AccessDenied):
                raise error
            return {hop: error}
        if event.step <= call.answered:
            return {}
        if index == 0 and not call.outputs:
            self.refused = event.step
        if isinstance(error, PeerBusy):
            return {hop: error}
        if index == 0:
            raise error
        if hop.refused is not None and event.step > hop.refused:
            return {}  # in the wake of the one that is refused already
        hop.refused = event.step
        # The input came from the server before: that one is not right, or else this one.
        call.num_refusals += 1
        if call.num_refusals > _MAX_REFUSALS:
            raise error
        before = self._hops[index - 1]
        server = before.hop.server
        reason = f"server {server.short_id} sent on what is wrong: {error}"
        errors: dict[HopSession, SwarmError] = {before: BadReply(reason, server.peer_id, before.span)}
        if call.num_refusals > 1:
            errors[hop] = PeerError(str(error), hop.hop.server.peer_id, hop.span)
        return errors

    def _relay(self, answer: Answer, sender: HopSession, to: HopSession, call: Call) -> Failures:
        step = to.replayed.get(answer.step) or call.step(answer.step)
        if step is None:
            return {}
        ours, theirs = step.message.hidden, answer.hidden
        if theirs is None or (theirs.header.dtype, theirs.header.shape) != (ours.dtype, ours.shape):
            return _bad_reply(sender, f"server {sender.hop.server.short_id} answered another shape")
        relayed = sender.number, answer.route, answer.step
        if relayed not in self._relayed:  # once: who says the same again and again does not get on
            self._relayed.add(relayed)
            self.progress_s = now_s()
        onward = step.with_hidden(theirs)
        to.post(onward.message, onward.parts)
        return {}

    def _take_block_output(self, answer: BlockAnswer, hop: HopSession, call: Call) -> Failures:
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

    def _take_output(self, answer: Answer, last: HopSession, call: Call) -> Failures:
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
            if hop.refused == step.number:
                hop.refused = None
        self._on_answer()
        return {}


def _late_hop(numbers: Sequence[int], last_number: int) -> int | None:
    """Return the index of the hop that the others wait for; None if all have finished.

    That is the first one that has not finished, unless it may do no more until the next hop has taken what it has sent.

    Args:
        numbers: of the last step that each hop has done; before the first: the one before that.
        last_number: of the last step that there is.
    """
    late = next((i for i, number in enumerate(numbers) if number < last_number), None)
    while late is not None and late + 1 < len(numbers) and numbers[late] - numbers[late + 1] > MAX_UNTAKEN:
        late += 1
    return late


def _numbers(hop: HopSession, call: Call) -> Iterable[int]:
    """Of the steps that a hop knows of."""
    return chain(hop.replayed, (step.number for step in call.steps))


def _bad_reply(hop: HopSession, reason: str) -> Failures:
    return {hop: BadReply(reason, hop.hop.server.peer_id, hop.span)}
