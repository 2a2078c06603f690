"""Opens the hops of a chain, and carries out what ``swarm_client.failover`` decides when some of them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from swarm_client.core.background import now_s
from swarm_client.core.events import Recovery, Reporter, Waiting
from swarm_client.failover import messages
from swarm_client.failover.failover import CallProgress, FailoverState
from swarm_client.failover.journal import Journal
from swarm_client.failover.replay import HopProgress, Taken
from swarm_client.routing.compression import known_to
from swarm_client.routing.prompts import MAX_PAGED, NUM_FEATURES, pages_of
from swarm_client.sessions.admission import AdmissionWait
from swarm_client.sessions.call import SessionCall
from swarm_client.sessions.opening import Opener, Opening, Terms, abandon
from swarm_client.sessions.standby import StandbyReplicas
from swarm_client.swarm.stall import Stall
from swarm_client.swarm.swarm import Swarm
from swarm_client.swarm.watchdog import Stalled
from swarm_client.transport.hops import HopSession
from swarm_client.transport.steps import OutgoingStep, chunk_size, may_be_resent, split
from swarm_client.transport.wire_tensor import WireTensor
from swarm_protocol.codecs.sizes import CODEC_NAMES
from swarm_protocol.errors import NoRoute, PeerBusy, PeerError, SessionLost, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span

_RETRY_S = 0.2  # the pause between two looks for servers while blocks are missing
_MAX_TRIALS = 4  # rounds of trials before servers that were not tried are taken


class HopReplacer:
    """The source of new hops for one chain: for all blocks, or for hops that fail. Only the chain puts them in."""

    def __init__(
        self,
        hops: Sequence[HopSession],
        swarm: Swarm,
        opener: Opener,
        terms: Terms,
        standby: StandbyReplicas,
        reporter: Reporter,
    ) -> None:
        """Take ``hops``, the chain's live list of hops."""
        self._hops = hops
        self._swarm = swarm
        self._opener = opener
        self._terms = terms
        self._standby = standby
        self._reporter = reporter
        self._stall: Stall | None = None
        self._room = AdmissionWait(swarm, opener, reporter)
        self._new: list[HopSession] = []  # hops that are not in the chain yet
        self._hidden_size = 0
        self._stalled: set[str] = set()  # peer ids of servers that are left out for the rest of the session

    def begin_call(self, may_wait: bool) -> None:
        """Start a call. ``may_wait``: wait for KV room; otherwise the call fails at once where there is none."""
        self._stall = None
        self._room.begin_call(may_wait)

    def begin_recovery(self, progress_s: float) -> None:
        """Start a stall that began at ``progress_s``, unless one has started already."""
        if self._stall is None:
            timeout_s = self._swarm.config.recovery_timeout_s
            self._stall = Stall(progress_s, now_s() + timeout_s, timeout_s)

    def answered(self) -> None:
        """End the stall, if there is one, and report what was repaired."""
        self._room.over()
        stall, self._stall = self._stall, None
        if stall is None:
            return
        seconds = now_s() - stall.start_s
        # The repairs of one stall share its duration, so only one of them reports it.
        for number, repair in enumerate(stall.repairs):
            self._reporter.report(repair if number else replace(repair, stall_s=seconds))
        for hop in self._hops:
            self._swarm.served(hop.hop.server.peer_id)

    # ------------------------------------------------------------ hops for a whole chain

    async def open_all(self, blocks: Span, call: SessionCall, sent_number: int) -> list[HopSession]:
        """Return new hops over all blocks, with room for the call's rows. The caller must replay earlier positions.

        Raises:
            NoRoute, PeerBusy, RecoveryFailed: see ``_opened``.
        """
        rows = call.after
        opening = self._terms.opening(rows.batch_size, rows.length, sent_number, num_copies=call.num_copies)
        pages = self._pages_of(rows)
        hops = await self._opened(blocks, replace(opening, prompt_pages=pages), None, None)
        assert hops is not None  # there were no hops that would have to be given up
        parts = [(hop.hop.server.peer_id, hop.span) for hop in hops]
        self._swarm.prompts.add(parts, pages, now_s())
        return hops

    def _pages_of(self, rows: Journal) -> tuple[bytes, ...]:
        """Return the pages of the first row; none if servers cannot share them with other sessions.

        Servers share no recurrent states. An adapter of the client's own may change from one session to the next.
        """
        if self._swarm.traits.has_states or self._opener.adapter.tensors:
            return ()
        return pages_of(rows.features(0, MAX_PAGED, NUM_FEATURES), self._opener.adapter.name)

    def replay_all(self, call: SessionCall, hops: list[HopSession]) -> list[OutgoingStep]:
        """Return the steps that bring new hops up to date: the history, then the call's own steps."""
        steps = [*self._history(call.after, (0, call.start), hops), *call.steps]
        _remember(hops, steps)
        if self._stall is not None:
            blocks = Span(hops[0].span.start, hops[-1].span.end)
            replacements = tuple(hop.hop.server.peer_id for hop in hops)
            reason = self._stall.tried[0] if self._stall.tried else "the session's servers were let go"
            self._stall.repairs[:] = [Recovery(blocks, (), reason, replacements, call.start, False, 0.0)]
        return steps

    async def _opened(
        self, span: Span, opening: Opening, after: HopSession | None, instead: HopSession | None
    ) -> list[HopSession] | None:
        """Return hops over ``span``; if some servers refuse or are gone, other servers are asked.

        Returns:
            The hops, or None if servers are full, so that the session must give up its hops and wait for room.

        Raises:
            NoRoute: no servers hold the blocks, and there is no stall.
            PeerBusy: there has been no room for ``wait_timeout_s``, or there can never be.
            RecoveryFailed: the time for a recovery is over.
        """
        full = {} if self._stall is None else self._stall.full
        while True:
            try:
                cautious = await self._who_may_stall(span)
                return await self._open_in_time(span, opening, after, instead, {*full, *cautious})
            except NoRoute as error:
                if cautious and not self._swarm.is_covered(span, {*full, *cautious}):
                    self._stalled.clear()  # no other servers hold the blocks
                elif full:
                    shortage = next(iter(full.values()))
                    full.clear()
                    if instead is not None:  # a session that holds room must not wait for more, or circles could arise
                        await self._room.begin(shortage)
                        return None
                    if hops := await self._wait_for_room(span, opening, shortage):
                        return hops
                elif self._stall is None:
                    raise
                else:
                    self._stall.tried.append(str(error))
                    self._stall.check_time(span)
                    await asyncio.sleep(_RETRY_S)
            except PeerBusy as error:
                full[error.peer_id] = error
                self._add_to_tried(error)
            except PeerError as error:
                self._failed_to_open(error, span)

    async def _open_in_time(
        self, span: Span, opening: Opening, after: HopSession | None, instead: HopSession | None, avoid: set[str]
    ) -> list[HopSession]:
        """Open and return hops over ``span``, during a stall in the time that is left of it."""
        like, stall = None if instead is None else instead.hop.server, self._stall
        if stall is None:
            return await self._opener.open_span(span, opening, after, avoid=avoid, like=like)
        timeout_s, on_wait = stall.time_left_s, self._report_waiting
        return await self._opener.open_span(
            span, opening, after, avoid=avoid, like=like, timeout_s=timeout_s, on_wait=on_wait
        )

    async def _who_may_stall(self, span: Span) -> set[str]:
        """Return the peer ids to avoid, because some servers in this session accepted steps and computed nothing.

        All unproven servers are avoided if the others hold the blocks. If not, all candidates are tried out together
        first: one after the other, many stalling servers would cost a stall each.
        """
        if not self._stalled or self._stall is None:
            return set()
        for _ in range(_MAX_TRIALS):
            avoid = self._stalled | self._swarm.unproven()
            if self._swarm.is_covered(span, avoid):
                return avoid
            if not await self._opener.try_out(span, self._stalled, self._hidden_size):
                break
        return set(self._stalled) if self._swarm.is_covered(span, self._stalled) else set()

    async def _wait_for_room(self, span: Span, opening: Opening, shortage: PeerBusy) -> list[HopSession]:
        """Return hops once there is room; empty if a server has failed, since other servers may remain."""
        start_s = now_s()
        try:
            return await self._room.hops(span, opening, shortage)
        except PeerBusy:
            raise
        except PeerError as error:
            self._failed_to_open(error, span)
            return []
        finally:
            if self._stall is not None:  # waiting for room does not use up the time for failed servers
                self._stall.extend(now_s() - start_s)

    def _failed_to_open(self, error: PeerError, span: Span) -> None:
        """Record the failure. Raise RecoveryFailed if there is no time left for other servers."""
        self._swarm.failed(error)
        self._add_to_tried(error)
        if self._stall is not None:
            self._stall.check_time(span)

    def _report_waiting(self, reason: str, timeout_s: float) -> None:
        """Report the wait once per stall: servers that are gone stay in the DHT for a while, and are tried again."""
        assert self._stall is not None
        if self._stall.begin_waiting():
            self._reporter.report(Waiting(reason, timeout_s))

    def _add_to_tried(self, error: SwarmError) -> None:
        if self._stall is not None:
            self._stall.tried.append(str(error))

    # ------------------------------------------------------------ hops that fail

    def begin_failover(self, call: SessionCall, past: Iterable[Taken]) -> FailoverState:
        """Return the first state of a failover. A stall must have begun."""
        self._hidden_size = call.inputs.hidden.shape[-1]
        batch_size, is_watched = call.before.batch_size, bool(call.watched)
        # Hops keep their outputs without the additions to later blocks.
        lacks_additions = any(hop.span.end < call.after.num_added for hop in self._hops)
        starts_over = is_watched or lacks_additions
        progress = CallProgress(tuple(call.taken), call.start, call.answered, tuple(past), batch_size, starts_over)
        return FailoverState(progress, tuple(_link(hop, call.first_number) for hop in self._hops))

    def failure(self, errors: Mapping[HopSession, SwarmError]) -> messages.Failed:
        return messages.Failed({hop.number: error for hop, error in errors.items()}, self._is_late)

    async def carry_out(self, instruction: messages.Instruction, call: SessionCall) -> messages.Event | None:
        """Carry out the instruction, and return the event that it leads to, if there is one.

        Raises:
            RecoveryFailed, PeerBusy: see ``_opened``.
        """
        match instruction:
            case messages.Blame(errors, avoid):
                self._blame(errors, avoid)
            case messages.GiveUp(span):
                self._current_stall.check_time(span)
            case messages.Abandon(numbers):
                abandon(self._hop(number) for number in numbers)
            case messages.AbandonNew():
                self.abandon_new()
            case messages.Ask(numbers, hold):
                return await self._ask([self._hop(number) for number in numbers], hold)
            case messages.AskReplica(of):
                return await self._ask_replica(self._hop(of))
            case messages.UseReplica(after, reroute, resend):
                return await self._use_replica(None if after is None else self._hop(after), reroute, resend, call)
            case messages.OpenHops():
                return await self._open(instruction, call)
            case messages.Connect():
                return await self._connect(instruction, call)
            case _:
                raise AssertionError(f"{instruction} is the chain's own")
        return None

    def splice(self, instruction: messages.Splice) -> list[HopSession]:
        """Return the new hops for ``gap``, and abandon the hops that they replace."""
        replaced, (new, self._new) = self._hops[instruction.gap.start : instruction.gap.stop], (self._new, [])
        abandon(replaced)
        self._standby.drop(replaced)
        self._current_stall.repairs.append(
            Recovery(  # the duration is not known before the next answer
                Span(replaced[0].span.start, replaced[-1].span.end),
                tuple(hop.hop.server.peer_id for hop in replaced),
                str(instruction.error),
                tuple(hop.hop.server.peer_id for hop in new),
                instruction.replayed_tokens,
                instruction.from_replica,
                0.0,
            )
        )
        return new

    def abandon_new(self) -> None:
        """End the streams of the new hops; only this object knows them."""
        new, self._new = self._new, []
        abandon(new)

    @property
    def _current_stall(self) -> Stall:
        assert self._stall is not None
        return self._stall

    @property
    def _is_late(self) -> bool:
        return not self._current_stall.time_left_s

    def _hop(self, number: int) -> HopSession:
        return next(hop for hop in self._hops if hop.number == number)

    def _blame(self, errors: Mapping[int, SwarmError], avoid: bool) -> None:
        stall = self._current_stall
        for number, error in errors.items():
            server = self._hop(number).hop.server
            stall.blame(server.peer_id, error)
            if isinstance(error, Stalled):
                self._stalled.add(server.peer_id)
                self._swarm.distrust_newcomers()
            if isinstance(error, PeerBusy):
                stall.full[server.peer_id] = error
            elif isinstance(error, PeerError) and not isinstance(error, SessionLost) and avoid:
                self._swarm.failed(error)

    async def _ask(self, hops: list[HopSession], hold: Iterable[int]) -> messages.HopsAsked:
        asking = (hop.progress(hop.number in hold, self._swarm.config.timeouts.probe_s) for hop in hops)
        results = await asyncio.gather(*asking, return_exceptions=True)
        standings, errors = {}, {}
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, SwarmError):
                errors[hop.number] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                standings[hop.number] = _standing(hop, result)
        return messages.HopsAsked(standings, errors, self._is_late)

    async def _ask_replica(self, of: HopSession) -> messages.ReplicaAsked:
        replica = self._standby.take(of)
        if replica is None:
            return messages.ReplicaAsked(None)
        self._new = [replica]
        try:
            standing = _standing(replica, await replica.progress(timeout_s=self._swarm.config.timeouts.probe_s))
        except SwarmError:  # the replica is gone as well
            self.abandon_new()
            return messages.ReplicaAsked(None)
        return messages.ReplicaAsked(standing, replica.next_number, replica.max_step_tokens)

    async def _use_replica(
        self, after: HopSession | None, reroute: bool, resend: Iterable[int], call: SessionCall
    ) -> messages.HopsOpened | messages.ReplicaLost:
        (replica,) = self._new
        try:
            if reroute and after is not None:
                codec = self._swarm.links.codec(replica.hop.server, after.hop.server)
                await replica.reroute(after, [step.without_data() for step in _steps(call, resend)], codec)
        except SwarmError:
            return messages.ReplicaLost()
        return messages.HopsOpened()

    async def _open(
        self, instruction: messages.OpenHops, call: SessionCall
    ) -> messages.HopsOpened | messages.ServersFull:
        replay = instruction.replay
        rows = call.after if replay.after_changes else call.before
        num_tokens = max(rows.length, call.after.length)  # before a crop of the call, the rows may be longer
        opening = self._terms.opening(
            rows.batch_size, num_tokens, replay.sent_number, replay.changed_number, num_copies=call.num_copies
        )
        after = None if instruction.after is None else self._hop(instruction.after)
        hops = await self._opened(instruction.span, opening, after, self._hop(instruction.instead))
        if hops is None:
            return messages.ServersFull()
        self._new = hops
        return messages.HopsOpened()

    async def _connect(
        self, instruction: messages.Connect, call: SessionCall
    ) -> messages.Connected | messages.NotConnected:
        """Let the hop before the new ones, or the client, send the new hops all that they must replay."""
        new, replay = self._new, instruction.replay
        if _are_too_large(call.steps, new):
            return messages.NotConnected()
        rows = call.after if replay.after_changes else call.before
        history = self._history(rows, replay.history, new, instruction.number)
        steps = [*history, *_steps(call, (step.number for step in replay.resend))]
        bare = [step.without_data() for step in steps]
        if instruction.before is not None and not may_be_resent(bare):  # the session then starts over
            return messages.NotConnected()
        _remember(new, steps)
        links = tuple(_link(hop, call.first_number) for hop in new)
        if instruction.before is None:
            self._swarm.links.measure([new[0].hop.server])
            for step in _readable(steps, new[0]):
                new[0].post(step.message, step.parts)
            return messages.Connected(links)
        try:
            before = self._hop(instruction.before)
            codec = self._swarm.links.codec(before.hop.server, new[0].hop.server)
            await before.reroute(new[0], bare, codec)
        except SwarmError as error:
            return messages.NotConnected({instruction.before: error}, self._is_late)
        return messages.Connected(links)

    def _history(
        self, rows: Journal, history: tuple[int, int], hops: list[HopSession], number: int = 1
    ) -> list[OutgoingStep]:
        """Return steps with these positions for new hops, numbered from ``number``."""
        start, end = history
        if end <= start:
            return []
        num_slow = self._swarm.links.num_slow([hop.hop for hop in hops], (end - start) * rows.batch_size)
        size = chunk_size(end - start, rows.batch_size, [hop.max_step_tokens for hop in hops], num_slow)
        codec = self._opener.codec_to(hops[0])
        return split(rows.read(start, end), start=start, number=number, size=size, codec=codec)


def _steps(call: SessionCall, numbers: Iterable[int]) -> list[OutgoingStep]:
    return [step for step in map(call.step, numbers) if step is not None]


def _readable(steps: Iterable[OutgoingStep], hop: HopSession) -> Iterable[OutgoingStep]:
    """Yield the steps in codecs that the server knows: the call's steps were encoded for another server."""
    known = known_to(hop.hop.server)
    for step in steps:
        hidden = WireTensor(step.message.hidden, step.parts)
        is_known = CODEC_NAMES[hidden.header.codec] in known
        yield step if is_known else step.with_hidden(hidden.recoded(pb.RAW))


def _are_too_large(steps: Iterable[OutgoingStep], hops: Iterable[HopSession]) -> bool:
    """Return whether some step is too large for one of the hops, and could be cut into smaller steps."""
    limit = min(hop.max_step_tokens for hop in hops)
    return any(not step.fits(limit) and step.end - step.start > 1 for step in steps)


def _remember(hops: list[HopSession], steps: list[OutgoingStep]) -> None:
    """Keep the replayed steps: if servers cannot reach one another, the client relays them, maybe much later."""
    replayed = {step.number: OutgoingStep(step.without_data(), ()) for step in steps}
    for hop in hops:
        hop.remember(replayed)


def _link(hop: HopSession, first_number: int) -> messages.FailoverHop:
    """Return the hop as a link. ``first_number``: the number of the call's first step."""
    server = hop.hop.server
    replayed = max((number for number in hop.replayed if number < first_number), default=0)
    return messages.FailoverHop(hop.number, hop.span, server.peer_id, server.short_id, replayed)


def _standing(hop: HopSession, progress: pb.SessionProgress) -> HopProgress:
    return HopProgress(progress.number, progress.length, hop.changed_number)
