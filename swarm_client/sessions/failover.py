"""Puts a chain together: opens one where there is none, and replaces hops that fail in the middle of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from swarm_client.core.background import now_s
from swarm_client.core.events import Recovery, Reporter, Waiting
from swarm_client.sessions.admission import AdmissionWait
from swarm_client.sessions.call import Call
from swarm_client.sessions.journal import Journal
from swarm_client.sessions.opening import Opener, Opening, abandon
from swarm_client.sessions.recovery import Replay, Standing, gaps, plan_catching_up, plan_replay
from swarm_client.sessions.standby import StandbyReplicas
from swarm_client.swarm.stall import Repair, Stall
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.hops import HopSession
from swarm_client.transport.steps import OutgoingStep, chunk_size, split
from swarm_protocol.errors import NoRoute, PeerBusy, PeerError, SessionLost, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span

if TYPE_CHECKING:
    from swarm_client.sessions.chain import Chain

_RETRY_S = 0.2


class HopsFailed(Exception):
    """These hops cannot go on, and why."""

    def __init__(self, errors: Mapping[HopSession, SwarmError]) -> None:
        super().__init__(*errors.values())
        self.errors = errors


class StartOver(Exception):
    """All hops are to be replaced, and the call begins again: with other steps, or once there is room."""


class Failover:
    """What becomes of the hops of one chain. ``recovery.py`` decides what is replayed to new ones; here it is done."""

    def __init__(
        self, chain: Chain, swarm: Swarm, blocks: Span, opener: Opener, copies: StandbyReplicas, reporter: Reporter
    ) -> None:
        self._chain = chain
        self._swarm = swarm
        self._blocks = blocks
        self._opener = opener
        self._copies = copies
        self._reporter = reporter
        self._stall: Stall | None = None
        self._room = AdmissionWait(swarm, opener, reporter)

    def begin_call(self) -> None:
        self._stall = None
        self._room.over()

    def answered(self) -> None:
        """The stall, if there was one, is over."""
        self._room.over()
        stall, self._stall = self._stall, None
        if stall is None:
            return
        seconds = now_s() - stall.start_s
        for number, repair in enumerate(stall.repairs):
            self._reporter.report(Recovery(**vars(repair), stall_s=seconds if number == 0 else 0.0))
        for hop in self._chain.hops:
            self._swarm.served(hop.hop.server.peer_id)

    # ------------------------------------------------------------ a chain where there is none

    async def open(self, call: Call) -> None:
        """Opens hops for all blocks, and replays everything that came before the call."""
        if call.before.length and not self._chain.is_new:
            self._begin()
        call.before, call.changes = call.after.cropped(call.start), ()  # new hops get the rows as they are now
        rows = call.after
        hops = await self._opened(
            self._blocks, rows.batch_size, rows.length, None, None, sent_number=self._chain.number
        )
        self._chain.hops, self._chain.is_new = hops, False
        self._chain.cut(call)
        steps = [*self._history(rows, (0, call.start), hops), *call.steps]
        _remember(hops, steps)
        self._chain.post(steps)
        if self._stall is not None:
            replacements = tuple(hop.hop.server.peer_id for hop in hops)
            reason = self._stall.tried[0] if self._stall.tried else "the session's servers were let go"
            self._stall.repairs[:] = [Repair(self._blocks, (), reason, replacements, call.start, False)]

    async def _opened(
        self,
        span: Span,
        batch_size: int,
        num_tokens: int,
        after: HopSession | None,
        instead: HopSession | None,
        *,
        sent_number: int = 0,
        changed_number: int = 0,
    ) -> list[HopSession]:
        """Hops over ``span``; takes other servers if some refuse or are gone.

        Raises:
            NoRoute: at first, if there are no servers.
            PeerBusy: there has been no room for ``wait_timeout_s``, or there never is.
            RecoveryFailed: in a stall, if there is no time left.
            StartOver: servers are full, and the session must give up what it has before it waits for them.
        """
        opening = self._chain.opening(batch_size, num_tokens, sent_number, changed_number)
        full = {} if self._stall is None else self._stall.full
        while True:
            try:
                return await self._opener.open_span(
                    span,
                    opening,
                    after,
                    avoid=full,
                    timeout_s=None if self._stall is None else self._stall.time_left_s,
                    like=None if instead is None else instead.hop.server,
                    on_wait=None if self._stall is None else self._report_waiting,
                )
            except NoRoute as error:
                if full:
                    shortage = next(iter(full.values()))
                    full.clear()
                    if instead is not None:
                        await self._room.begin(shortage)
                        raise StartOver from None
                    hops = await self._wait_for_room(span, opening, shortage)
                    if hops:
                        return hops
                    continue
                if self._stall is None:
                    raise
                self._stall.tried.append(str(error))
                self._check_time(span)
                await asyncio.sleep(_RETRY_S)
            except PeerBusy as error:
                full[error.peer_id] = error
                self._note(error)
            except PeerError as error:
                self._failed(error, span)

    async def _wait_for_room(self, span: Span, opening: Opening, shortage: PeerBusy) -> list[HopSession]:
        """None if a server has failed: there may be others."""
        start_s = now_s()
        try:
            return await self._room.hops(span, opening, shortage)
        except PeerBusy:
            raise
        except PeerError as error:
            self._failed(error, span)
            return []
        finally:
            if self._stall is not None:  # which is about servers that fail
                self._stall.deadline_s += now_s() - start_s

    def _failed(self, error: PeerError, span: Span) -> None:
        """A server that was to be asked. Raises RecoveryFailed if it is enough."""
        self._swarm.failed(error)
        self._note(error)
        self._check_time(span)

    def _history(
        self, rows: Journal, history: tuple[int, int], hops: list[HopSession], number: int = 1
    ) -> list[OutgoingStep]:
        """The steps, numbered from ``number``, by which hops learn these positions."""
        start, end = history
        if end <= start:
            return []
        limits = [hop.max_step_tokens for hop in hops]
        size = chunk_size(end - start, rows.batch_size, limits)
        return split(rows.read(start, end), start=start, number=number, size=size, codec=self._chain.codec)

    # ------------------------------------------------------------ hops that fail

    async def recover(self, call: Call, errors: Mapping[HopSession, SwarmError]) -> None:
        """Replaces failed hops, and any that fail meanwhile."""
        self._begin()
        self._blame(errors)
        failed = dict(errors)
        if call.watched:  # what a failed hop has sent on is not sent to the client again
            self._check_failing(failed)
            abandon(failed)
            raise StartOver
        while True:
            try:
                self._check_failing(failed)
                standings = await self._ask(failed, call)
                for gap in gaps([hop in failed for hop in self._chain.hops]):
                    await self._close_gap(gap, standings, failed, call)
                self._chain.got_on()
                return
            except HopsFailed as failure:
                self._blame(failure.errors)
                failed = {hop: error for hop, error in failed.items() if hop in self._chain.hops} | dict(failure.errors)

    async def _ask(self, failed: dict[HopSession, SwarmError], call: Call) -> dict[HopSession, Standing]:
        """Where the others stand; those that do not answer, or do not know all from before the call, are added to the
        failed.

        Hops before a failed one get no further until they are rerouted.
        """
        while True:
            asked = [hop for hop in self._chain.hops if hop not in failed]
            held = {hop for hop, following in pairwise(self._chain.hops) if following in failed}
            asking = (hop.progress(hold=hop in held, timeout_s=self._swarm.config.timeouts.probe_s) for hop in asked)
            results = await asyncio.gather(*asking, return_exceptions=True)
            standings, errors = {}, {}
            for hop, result in zip(asked, results, strict=True):
                if isinstance(result, SwarmError):
                    errors[hop] = result
                elif isinstance(result, BaseException):
                    raise result
                elif result.number >= max((number for number in hop.replayed if number < call.first_number), default=0):
                    standings[hop] = _standing(hop, result)
                else:
                    server = hop.hop.server
                    errors[hop] = SessionLost(f"server {server.short_id} was not ready yet", server.peer_id, hop.span)
            if not errors:
                return standings
            self._blame(errors)
            failed |= errors

    async def _close_gap(
        self, gap: range, standings: Mapping[HopSession, Standing], failed: Mapping[HopSession, SwarmError], call: Call
    ) -> None:
        replaced = self._chain.hops[gap.start : gap.stop]
        before = self._chain.hops[gap.start - 1] if gap.start else None
        after = self._chain.hops[gap.stop] if gap.stop < len(self._chain.hops) else None
        known_before = None if before is None else standings[before]
        known_after = None if after is None else standings[after]
        caught_up = await self._take_copy(replaced, known_before, after, known_after, call)
        if caught_up is not None:
            new, replay = caught_up
            rows, number = call.before, call.first_number - 1
        else:
            replay = plan_replay(call.taken, call.start, known_before, known_after, call.answered)
            rows, number = call.after if replay.after_changes else call.before, 1
            new = await self._opened(
                Span(replaced[0].span.start, replaced[-1].span.end),
                rows.batch_size,
                max(rows.length, call.after.length),
                after,
                replaced[0],
                sent_number=replay.sent_number,
                changed_number=replay.changed_number,
            )
        try:
            await self._connect(call, replay, rows, number, before, new)
        except BaseException:  # an interruption among them: nobody else knows of the new hops yet
            abandon(new)
            raise
        abandon(replaced)
        self._chain.hops[gap.start : gap.stop] = new
        self._copies.drop(replaced)
        assert self._stall is not None
        self._stall.repairs.append(
            Repair(
                Span(replaced[0].span.start, replaced[-1].span.end),
                tuple(hop.hop.server.peer_id for hop in replaced),
                str(failed[replaced[0]]),
                tuple(hop.hop.server.peer_id for hop in new),
                replay.history[1] - replay.history[0],
                caught_up is not None,
            )
        )

    async def _connect(
        self, call: Call, replay: Replay, rows: Journal, number: int, before: HopSession | None, new: list[HopSession]
    ) -> None:
        """Lets the hop before the new ones, or the client, replay what they need."""
        limit = min(hop.max_step_tokens for hop in new)
        if any(step.num_positions > limit and step.end - step.start > 1 for step in call.steps):
            raise StartOver
        numbers = [step.number for step in replay.resend]
        resend = [step for step in map(call.step, numbers) if step is not None]
        steps = [*self._history(rows, replay.history, new, number), *resend]
        _remember(new, steps)
        if before is None:
            for step in steps:
                new[0].post(step.message, step.parts)
            return
        try:
            await before.reroute(new[0], [step.without_data() for step in steps])
        except SwarmError as error:
            raise HopsFailed({before: error}) from None

    async def _take_copy(
        self,
        replaced: list[HopSession],
        known_before: Standing | None,
        after: HopSession | None,
        known_after: Standing | None,
        call: Call,
    ) -> tuple[list[HopSession], Replay] | None:
        """The copy that stands by for the failed hop, if it is of use, and what must still be replayed to it."""
        copy = self._copies.take(replaced[0]) if len(replaced) == 1 else None
        if copy is None:
            return None
        replay = None
        try:
            known = _standing(copy, await copy.progress(timeout_s=self._swarm.config.timeouts.probe_s))
            # Steps whose outputs the copy has, and the failed hop did not get through with.
            received = call.answered if known_after is None else known_after.number
            lost = [step for step in call.steps if received < step.number <= known.number]
            planned = plan_catching_up(known, call.taken, call.start, self._chain.past, known_before)
            if planned is not None and self._can_tell(copy, planned, call) and not (after is None and lost):
                if after is not None and (lost or copy.next_number != after.number):
                    await copy.reroute(after, [step.without_data() for step in lost])
                replay = planned
        except SwarmError:
            pass  # it is gone as well
        finally:
            if replay is None:
                copy.abandon()
        return None if replay is None else ([copy], replay)

    @staticmethod
    def _can_tell(copy: HopSession, replay: Replay, call: Call) -> bool:
        """Whether the history fits into the one step whose number is free for it."""
        start, end = replay.history
        return (end - start) * call.before.batch_size <= max(1, copy.max_step_tokens)

    # ------------------------------------------------------------ time

    def _begin(self) -> None:
        if self._stall is None:
            timeout_s = self._swarm.config.recovery_timeout_s
            self._stall = Stall(self._chain.progress_s, now_s() + timeout_s, timeout_s)

    def _blame(self, errors: Mapping[HopSession, SwarmError]) -> None:
        """Avoids servers for a while, but not if it may be the client's own network that failed."""
        assert self._stall is not None
        all_at_once = len(errors) == len(self._chain.hops) > 1
        for hop, error in errors.items():
            self._note(error)
            self._stall.peer_id = self._stall.peer_id or hop.hop.server.peer_id
            if isinstance(error, PeerBusy):
                self._stall.full[hop.hop.server.peer_id] = error
            elif isinstance(error, PeerError) and not isinstance(error, SessionLost) and not all_at_once:
                self._swarm.failed(error)

    def _note(self, error: SwarmError) -> None:
        if self._stall is not None:
            self._stall.tried.append(str(error))

    def _check_failing(self, failed: Mapping[HopSession, SwarmError]) -> None:
        """Servers without room have not failed."""
        if not all(isinstance(error, PeerBusy) for error in failed.values()):
            self._check_time(next(iter(failed)).span)

    def _check_time(self, span: Span) -> None:
        if self._stall is not None:
            self._stall.check_time(span)

    def _report_waiting(self, reason: str, timeout_s: float) -> None:
        """Once in a stall: servers that are gone are still in the DHT for a while, and tried again and again."""
        assert self._stall is not None
        if not self._stall.waits:
            self._stall.waits = True
            self._reporter.report(Waiting(reason, timeout_s))


def _remember(hops: list[HopSession], steps: list[OutgoingStep]) -> None:
    """What is replayed to new hops: servers that cannot reach one another let the client relay it, maybe much later."""
    replayed = {step.number: OutgoingStep(step.without_data(), ()) for step in steps}
    for hop in hops:
        hop.replayed = replayed


def _standing(hop: HopSession, progress: pb.SessionProgress) -> Standing:
    return Standing(progress.number, progress.length, hop.changed_number)
