"""A session's chain of servers: steps go in, answers come out, and hops that fail or leave are replaced."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from swarm_client.background import now_s
from swarm_client.call import Call
from swarm_client.copies import Copies
from swarm_client.events import Recovery, Reporter, Waiting
from swarm_client.journal import Journal
from swarm_client.opening import CODECS, Opener, Opening, abandon, close
from swarm_client.recovery import Replay, Standing, Taken, gaps, plan_catching_up, plan_replay
from swarm_client.steps import Step, chunk_size, split
from swarm_client.swarm import Swarm, closed_error
from swarm_client.transport import PROBE_AFTER_S, PROBE_TIMEOUT_S, Answer, HopSession, Inbox, Leaving, Trouble
from swarm_protocol.errors import (
    AccessDenied,
    BadReply,
    NoRoute,
    PeerBusy,
    PeerError,
    PeerUnavailable,
    RecoveryFailed,
    SessionLost,
    SwarmError,
)
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire import FIRST_STEP

_RETRY_S = 0.2
_PAST_STEPS = 256  # that a copy may lag behind
_MAX_REFUSALS = 3  # of one call's steps by servers that blame the one before


class _HopsFailed(Exception):
    """These hops cannot go on, and why."""

    def __init__(self, errors: Mapping[HopSession, SwarmError]) -> None:
        super().__init__(*errors.values())
        self.errors = errors


class _StartOver(Exception):
    """The call must be cut into other steps."""


@dataclass
class _Repair:
    """Hops that took the place of others."""

    span: Span
    failed: tuple[str, ...]
    reason: str
    replacements: tuple[str, ...]
    replayed_tokens: int
    from_copy: bool


@dataclass
class _Stall:
    """From the last sign of progress before a failure to the next answer."""

    start_s: float
    deadline_s: float
    peer_id: str = ""  # of the server that failed first
    tried: list[str] = field(default_factory=list)
    full: dict[str, PeerBusy] = field(default_factory=dict)  # servers without room, by peer id
    repairs: list[_Repair] = field(default_factory=list)
    waits: bool = False  # the user has been told so


class Chain:
    """The hops of one session. Runs on the background loop; one call at a time.

    Attributes:
        records_past: sliding windows keep what later crops need.
        number: of the last step.
    """

    def __init__(
        self,
        swarm: Swarm,
        blocks: Span,
        max_positions: int | None,
        reserve_tokens: int,
        standby: bool,
        reporter: Reporter,
    ) -> None:
        self.hops: list[HopSession] = []
        self.records_past = False
        self.number = FIRST_STEP - 1
        self._swarm = swarm
        self._blocks = blocks
        self._max_positions = max_positions
        self._reserve_tokens = reserve_tokens
        self._reporter = reporter
        self._inbox = Inbox()
        self._opener = Opener(swarm, self._inbox)
        self._copies = Copies(self, swarm, self._opener, standby, reporter)
        self._inbox.on_leaving = self._copies.hop_leaves
        self._past: deque[Taken] = deque(maxlen=_PAST_STEPS)
        self._stall: _Stall | None = None
        self._refused: int | None = None  # a step that the first hop has refused
        self._probing: asyncio.Task | None = None
        self._progress_s = 0.0  # when the call last got on
        self.busy = asyncio.Lock()
        swarm.sessions.add(self)

    # ------------------------------------------------------------ one call

    async def step(self, call: Call) -> torch.Tensor:
        """Outputs of the last positions of the call, [batch, num_wanted, hidden_size].

        Raises:
            RequestRejected: the input is wrong. NoRoute, PeerBusy: no server has the blocks, or room for them.
            RecoveryFailed: servers failed, and the time to replace them is over.
        """
        async with self.busy:
            if self._swarm.closed:
                raise closed_error()
            self._stall = self._refused = None
            self._progress_s = now_s()
            try:
                await self._run(call)
            except BaseException:
                if (
                    self._refused is not None and self._refused == call.first_number
                ):  # the servers are as they were before
                    self.hops[0].unpost()
                else:
                    await asyncio.shield(self.forget())
                raise
            finally:
                if self._probing is not None:
                    self._probing.cancel()
                if call.steps:
                    self.number = call.steps[-1].number
            self._past.extend(call.taken)
        self._copies.arrange()
        return call.output()

    async def close(self) -> None:
        """Lets the servers go once no call is under way."""
        async with self.busy:
            await self.forget()

    async def forget(self) -> None:
        """Lets the servers go; the next call starts with others."""
        hops, self.hops = self.hops, []
        self._refused = None
        self._past.clear()
        await close([*hops, *self._copies.forget()])

    def standing(self, hop: HopSession, progress: pb.SessionProgress) -> Standing:
        return Standing(progress.number, progress.length, hop.changed_number)

    async def _run(self, call: Call) -> None:
        if self.hops:
            await self._copies.switch_ready()
        while True:
            try:
                if self.hops:
                    self._cut(call)
                    self._post(call.steps)
                else:
                    await self._open(call)
                self._progress_s = now_s()
                while not call.complete:
                    try:
                        self._handle(await self._next_event(call), call)
                    except _HopsFailed as failure:
                        await self._recover(call, failure.errors)
                return
            except _StartOver:
                call.outputs.clear()
                self.number = call.steps[-1].number
                await self.forget()

    def _cut(self, call: Call) -> None:
        """Into steps that no hop finds too long."""
        batch_size, num_tokens, _ = call.inputs.hidden.shape
        call.steps = split(
            call.inputs,
            start=call.start,
            number=self.number + 1,
            size=chunk_size(num_tokens, batch_size, [hop.max_step_tokens for hop in self.hops]),
            codec=self._codec,
            changes=call.changes,
            num_wanted=call.num_wanted,
        )

    def _post(self, steps: list[Step]) -> None:
        for step in steps:
            self.hops[0].post(step.message, step.parts)

    @property
    def _codec(self) -> int:
        return CODECS[self._swarm.config.compression]

    # ------------------------------------------------------------ what hops say

    async def _next_event(self, call: Call) -> Answer | Trouble | Leaving:
        """Asks all hops whether they are there when nothing comes for a while."""
        while True:
            try:
                event = await asyncio.wait_for(self._inbox.get(), PROBE_AFTER_S)
                if not isinstance(event, Trouble):
                    self._progress_s = now_s()
                return event
            except asyncio.TimeoutError:
                if self._probing is None or self._probing.done():
                    self._probing = asyncio.ensure_future(self._probe(call, list(self.hops)))

    async def _probe(self, call: Call, hops: list[HopSession]) -> None:
        """Trouble for hops that do not answer, or that have what they need and do not get on."""
        asked_s = now_s()
        asking = (hop.progress(timeout_s=PROBE_TIMEOUT_S) for hop in hops)
        results = await asyncio.gather(*asking, return_exceptions=True)
        timeout_s = self._swarm.config.step_timeout_s
        expected = call.steps[-1].number
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, SwarmError):
                self._inbox.put_nowait(Trouble(hop.number, None, result))
            if not isinstance(result, pb.SessionProgress):
                continue
            if result.number != hop.seen_number:
                hop.seen_number = result.number
                self._progress_s = max(self._progress_s, asked_s)
            if result.number < expected and now_s() - self._progress_s > timeout_s:
                server = hop.hop.server
                reason = f"server {server.short_id} did not finish a step within {timeout_s:g} s"
                error = PeerUnavailable(reason, server.peer_id, hop.span)
                self._inbox.put_nowait(Trouble(hop.number, None, error))
                return
            expected = result.number

    def _handle(self, event: Answer | Trouble | Leaving, call: Call) -> None:
        """Raises _HopsFailed if some hop must be replaced, or what the user must know."""
        index = next((i for i, hop in enumerate(self.hops) if hop.number == event.hop), None)
        if index is None:
            self._copies.handle(event)
        elif isinstance(event, Trouble):
            self._handle_trouble(event, index, call)
        elif isinstance(event, Answer) and event.relay:
            if index + 1 < len(self.hops) and event.route == self.hops[index].route:
                self._relay(event, self.hops[index], self.hops[index + 1], call)
        elif isinstance(event, Answer) and index == len(self.hops) - 1:
            step = call.step(event.step)
            if step is not None and step.number not in call.outputs:
                call.outputs[step.number] = self._decoded(event, step, call)
                self._go_on()

    def _handle_trouble(self, event: Trouble, index: int, call: Call) -> None:
        hop, error = self.hops[index], event.error
        if event.step is None or event.step < FIRST_STEP:
            if isinstance(error, AccessDenied):
                raise error
            raise _HopsFailed({hop: error})
        if event.step <= call.answered:
            return
        if index == 0 and not call.outputs:
            self._refused = event.step
        if isinstance(error, PeerBusy):
            raise _HopsFailed({hop: error})
        if index == 0:
            raise error
        # The input came from the server before: that one is not right, or else this one.
        call.num_refusals += 1
        if call.num_refusals > _MAX_REFUSALS:
            raise error
        before = self.hops[index - 1]
        server = before.hop.server
        reason = f"server {server.short_id} sent on what is wrong: {error}"
        errors: dict[HopSession, SwarmError] = {before: BadReply(reason, server.peer_id, before.span)}
        if call.num_refusals > 1:
            errors[hop] = PeerError(str(error), hop.hop.server.peer_id, hop.span)
        raise _HopsFailed(errors)

    def _relay(self, answer: Answer, sender: HopSession, to: HopSession, call: Call) -> None:
        step = to.history.get(answer.step) or call.step(answer.step)
        if step is None:
            return
        ours, theirs = step.message.hidden, answer.hidden and answer.hidden.header
        if theirs is None or (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
            server = sender.hop.server
            error = BadReply(f"server {server.short_id} answered another shape", server.peer_id, sender.span)
            raise _HopsFailed({sender: error})
        onward = step.with_hidden(answer.hidden)
        to.post(onward.message, onward.parts)

    def _decoded(self, answer: Answer, step: Step, call: Call) -> torch.Tensor | None:
        if not step.message.outputs_wanted:
            return None
        like, hop = call.inputs.hidden, self.hops[-1]
        try:
            if answer.hidden is None:
                raise BadReply(f"server {hop.hop.server.short_id} answered nothing")
            return answer.hidden.decode((like.shape[0], step.message.outputs_wanted, like.shape[2]), like.dtype)
        except BadReply as error:
            raise _HopsFailed({hop: BadReply(str(error), hop.hop.server.peer_id, hop.span)}) from None

    def _go_on(self) -> None:
        """An answer has come: the stall, if there was one, is over."""
        stall, self._stall = self._stall, None
        if stall is None:
            return
        seconds = now_s() - stall.start_s
        for number, repair in enumerate(stall.repairs):
            self._reporter.report(Recovery(**vars(repair), stall_s=seconds if number == 0 else 0.0))
        for hop in self.hops:
            self._swarm.served(hop.hop.server.peer_id)

    # ------------------------------------------------------------ a chain where there is none

    async def _open(self, call: Call) -> None:
        """Opens hops for all blocks, and tells them everything that came before the call."""
        if call.before.length:
            self._begin_stall()
        call.before, call.changes = call.after.cropped(call.start), ()  # new hops are told the rows as they are now
        rows = call.after
        hops = await self._opened(self._blocks, rows.batch_size, rows.length, None, None, sent_number=self.number)
        self.hops = hops
        self._cut(call)
        history = self._tell(rows, (0, call.start), hops)
        self._post([*history, *call.steps])
        if self._stall is not None:
            replacements = tuple(hop.hop.server.peer_id for hop in hops)
            reason = self._stall.tried[0] if self._stall.tried else "the session's servers were let go"
            self._stall.repairs[:] = [_Repair(self._blocks, (), reason, replacements, call.start, False)]

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
            NoRoute, PeerBusy: at first, if there are no servers, or none with room.
            RecoveryFailed: in a stall, if there is no time left.
        """
        opening = Opening(batch_size, self.reserve(num_tokens), sent_number, changed_number, self.records_past)
        full = {} if self._stall is None else self._stall.full
        while True:
            try:
                return await self._opener.open_span(
                    span,
                    opening,
                    after,
                    avoid=full,
                    timeout_s=self._time_left_s(),
                    like=None if instead is None else instead.hop.server,
                    on_wait=None if self._stall is None else self._report_waiting,
                )
            except NoRoute as error:
                if full and (self._stall is None or (instead is not None and instead.hop.server.peer_id in full)):
                    raise next(iter(full.values())) from None
                if self._stall is None:
                    raise
                self._stall.tried.append(str(error))
                self._check_time(span)
                full.clear()
                await asyncio.sleep(_RETRY_S)
            except PeerBusy as error:
                full[error.peer_id] = error
                self._note(error)
            except PeerError as error:
                self._swarm.failed(error)
                self._note(error)
                self._check_time(span)

    def reserve(self, num_tokens: int) -> int:
        """Positions per row to ask servers for, if there are ``num_tokens`` already."""
        reserve_tokens = max(self._reserve_tokens, num_tokens)
        return reserve_tokens if self._max_positions is None else min(reserve_tokens, self._max_positions)

    def _tell(self, rows: Journal, history: tuple[int, int], hops: list[HopSession], number: int = 1) -> list[Step]:
        """The steps, numbered from ``number``, by which hops learn these positions."""
        start, end = history
        if end <= start:
            return []
        limits = [hop.max_step_tokens for hop in hops]
        size = chunk_size(end - start, rows.batch_size, limits)
        steps = split(rows.read(start, end), start=start, number=number, size=size, codec=self._codec)
        for hop in hops:
            hop.history = {step.number: step for step in steps}
        return steps

    # ------------------------------------------------------------ hops that fail

    async def _recover(self, call: Call, errors: Mapping[HopSession, SwarmError]) -> None:
        """Replaces failed hops, and any that fail meanwhile."""
        self._begin_stall()
        self._blame(errors)
        failed = dict(errors)
        while True:
            try:
                self._check_time(next(iter(failed)).span)
                standings = await self._ask(failed)
                for gap in gaps([hop in failed for hop in self.hops]):
                    await self._close_gap(gap, standings, failed, call)
                self._progress_s, self._refused = now_s(), None
                return
            except _HopsFailed as failure:
                self._blame(failure.errors)
                failed = {hop: error for hop, error in failed.items() if hop in self.hops} | dict(failure.errors)

    async def _ask(self, failed: dict[HopSession, SwarmError]) -> dict[HopSession, Standing]:
        """Where the others stand; those that do not answer, or do not know enough, are added to the failed.

        Hops before a failed one get no further until they are rerouted.
        """
        while True:
            asked = [hop for hop in self.hops if hop not in failed]
            held = {hop for hop, following in pairwise(self.hops) if following in failed}
            asking = (hop.progress(hold=hop in held, timeout_s=PROBE_TIMEOUT_S) for hop in asked)
            results = await asyncio.gather(*asking, return_exceptions=True)
            standings, errors = {}, {}
            for hop, result in zip(asked, results, strict=True):
                if isinstance(result, SwarmError):
                    errors[hop] = result
                elif isinstance(result, BaseException):
                    raise result
                elif result.number >= max(hop.history, default=0):
                    standings[hop] = self.standing(hop, result)
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
        replaced = self.hops[gap.start : gap.stop]
        before = self.hops[gap.start - 1] if gap.start else None
        after = self.hops[gap.stop] if gap.stop < len(self.hops) else None
        known_before = None if before is None else standings[before]
        caught_up = await self._take_copy(replaced, known_before, before, after, call)
        if caught_up is not None:
            new, replay = caught_up
            rows, number = call.before, call.first_number - 1
        else:
            known_after = None if after is None else standings[after]
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
        await self._connect(call, replay, rows, number, before, new)
        abandon(replaced)
        self.hops[gap.start : gap.stop] = new
        self._copies.drop(replaced)
        self._stall.repairs.append(
            _Repair(
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
        """Lets the hop before the new ones, or the client, tell them what they must know."""
        resend = [call.step(step.number) for step in replay.resend]
        limit = min(hop.max_step_tokens for hop in new)
        if any(step.num_positions > limit and step.end - step.start > 1 for step in resend):
            await close(new)
            raise _StartOver
        steps = [*self._tell(rows, replay.history, new, number), *resend]
        if before is None:
            for step in steps:
                new[0].post(step.message, step.parts)
            return
        try:
            await before.reroute(new[0], [step.without_data() for step in steps])
        except SwarmError as error:
            await close(new)
            raise _HopsFailed({before: error}) from None

    async def _take_copy(
        self,
        replaced: list[HopSession],
        known_before: Standing | None,
        before: HopSession | None,
        after: HopSession | None,
        call: Call,
    ) -> tuple[list[HopSession], Replay] | None:
        """The copy that stands by for the failed hop, if it is of use, and what it must still be told."""
        copy = self._copies.take(replaced[0]) if len(replaced) == 1 else None
        if copy is None:
            return None
        try:
            known = self.standing(copy, await copy.progress(timeout_s=PROBE_TIMEOUT_S))
            replay = plan_catching_up(known, call.taken, call.start, self._past, known_before)
            start, end = (0, 0) if replay is None else replay.history
            if replay is not None and (end - start) * call.before.batch_size <= max(1, copy.max_step_tokens):
                if copy.next_number != (None if after is None else after.number):
                    await copy.reroute(after, [])
                return [copy], replay
        except SwarmError:
            pass
        copy.abandon()
        return None

    # ------------------------------------------------------------ time

    def _begin_stall(self) -> None:
        if self._stall is None:
            deadline_s = now_s() + self._swarm.config.recovery_timeout_s
            self._stall = _Stall(self._progress_s, deadline_s)

    def _blame(self, errors: Mapping[HopSession, SwarmError]) -> None:
        """Bans servers, but not if it may be the client's own network that failed."""
        all_at_once = len(errors) == len(self.hops) > 1
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

    def _report_waiting(self, reason: str, timeout_s: float) -> None:
        """Once in a stall: servers that are gone are still in the DHT for a while, and tried again and again."""
        if not self._stall.waits:
            self._stall.waits = True
            self._reporter.report(Waiting(reason, timeout_s))

    def _time_left_s(self) -> float | None:
        return None if self._stall is None else max(0.0, self._stall.deadline_s - now_s())

    def _check_time(self, span: Span) -> None:
        """Raises RecoveryFailed if the stall has lasted too long."""
        if self._stall is None or self._time_left_s():
            return
        tried = tuple(dict.fromkeys(self._stall.tried))
        raise RecoveryFailed(
            f"blocks {span} could not be moved to other servers within {self._swarm.config.recovery_timeout_s:g} s: "
            f"{'; '.join(tried)}. Nothing is lost: the session goes on from where it stood when it is used again",
            self._stall.peer_id,
            span,
            tried,
        )
