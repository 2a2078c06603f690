"""Failover of a session's hops in the middle of a call: a state machine without a socket or a clock. Pure.

``decide(state, event)`` takes an event, and returns the next state with the instructions to carry out. The chain
carries out the instructions in order; the last one ends the failover or leads to the next event::

  Failed ─► Ask ─► HopsAsked ─► AskReplica ─► ReplicaAsked ─► UseReplica ─► HopsOpened ─► Connect ─► Connected ─► Splice
                             └► OpenHops ─────────────────────────────────► HopsOpened

The part from ``HopsAsked`` on is repeated for each run of failed hops, the last run first; ``Resume`` follows the last
splice. Hops are identified by their numbers, which are never used twice in a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from swarm_client.failover.messages import (
    Abandon,
    AbandonNew,
    Ask,
    AskReplica,
    Blame,
    Connect,
    Connected,
    Event,
    Failed,
    FailoverHop,
    GiveUp,
    HopsAsked,
    HopsOpened,
    Instruction,
    NotConnected,
    OpenHops,
    ReplicaAsked,
    ReplicaLost,
    Resume,
    ServersFull,
    Splice,
    StartOver,
    UseReplica,
)
from swarm_client.failover.replay import HopProgress, Replay, Taken, gaps, plan_catching_up, plan_replay
from swarm_protocol.errors import PeerBusy, SessionLost, SwarmError
from swarm_protocol.span import Span


@dataclass(frozen=True)
class CallProgress:
    """The progress of the interrupted call.

    Attributes:
        steps: the steps of the call; ``past``: the last steps before the call.
        start: the position at which the call begins.
        answered: the number of the last step whose outputs the client has.
        starts_over: whether all hops must be replaced, because failed hops had something that no other hop can resend.
    """

    steps: tuple[Taken, ...]
    start: int
    answered: int
    past: tuple[Taken, ...] = ()
    batch_size: int = 1
    starts_over: bool = False


@dataclass(frozen=True)
class FailoverState:
    """The state of a failover.

    Attributes:
        links: the chain's hops, first blocks first.
        gaps: runs of failed hops that are still to be replaced, last first; the first entry is being replaced.
        replay: how the new hops of that gap catch up; ``is_replica``: a standby replica takes over the gap.
    """

    progress: CallProgress
    links: tuple[FailoverHop, ...]
    failed: Mapping[int, SwarmError] = field(default_factory=dict)
    standings: Mapping[int, HopProgress] = field(default_factory=dict)
    gaps: tuple[range, ...] = ()
    replay: Replay | None = None
    is_replica: bool = False

    @property
    def before(self) -> FailoverHop | None:
        """Return the hop before the gap; None stands for the client."""
        return self.links[self.gaps[0].start - 1] if self.gaps[0].start else None

    @property
    def after(self) -> FailoverHop | None:
        """Return the hop after the gap; None stands for the client."""
        return self.links[self.gaps[0].stop] if self.gaps[0].stop < len(self.links) else None

    @property
    def replaced(self) -> tuple[FailoverHop, ...]:
        return self.links[self.gaps[0].start : self.gaps[0].stop]

    def standing(self, link: FailoverHop | None) -> HopProgress | None:
        return None if link is None else self.standings[link.number]


Decision = tuple[FailoverState, list[Instruction]]


def decide(state: FailoverState, event: Event) -> Decision:
    """Return the state after ``event``, and the instructions to carry out."""
    match event:
        case Failed(errors, is_late):
            return _after_failure(state, errors, is_late)
        case HopsAsked():
            return _after_asking(state, event)
        case ReplicaAsked():
            return _after_asking_replica(state, event)
        case ReplicaLost():
            return _open(replace(state, is_replica=False), [AbandonNew()])
        case HopsOpened():
            assert state.replay is not None
            # A replica has taken earlier steps, so its history gets the one number that is free before the call. New
            # hops have taken none, so theirs is numbered from 1.
            number = state.progress.steps[0].number - 1 if state.is_replica else 1
            return state, [Connect(_number(state.before), state.replay, number)]
        case ServersFull():
            return state, [StartOver()]
        case Connected(links):
            return _after_connecting(state, links)
        case NotConnected(errors, is_late):
            if not errors:
                return state, [AbandonNew(), StartOver()]
            state, instructions = _after_failure(state, errors, is_late)
            return state, [AbandonNew(), *instructions]


def _after_failure(state: FailoverState, errors: Mapping[int, SwarmError], is_late: bool) -> Decision:
    present = {link.number for link in state.links}
    failed = {number: error for number, error in state.failed.items() if number in present} | dict(errors)
    state = replace(state, failed=failed)
    # Servers are not avoided if all hops fail at once: then the client's own network may be down.
    instructions: list[Instruction] = [Blame(errors, avoid=not len(errors) == len(state.links) > 1)]
    # Servers that lack room have not failed: admission has a time limit of its own.
    if is_late and not all(isinstance(error, PeerBusy) for error in failed.values()):
        return state, [*instructions, GiveUp(next(link.span for link in state.links if link.number in failed))]
    if state.progress.starts_over:
        return state, [*instructions, Abandon(tuple(failed)), StartOver()]
    # The hops before gaps pause, so that the progress they report is still true when they are rerouted.
    held = {link.number for link, following in pairwise(state.links) if following.number in failed}
    asked = tuple(link.number for link in state.links if link.number not in failed)
    return state, [*instructions, Ask(asked, frozenset(held.intersection(asked)))]


def _after_asking(state: FailoverState, event: HopsAsked) -> Decision:
    errors = dict(event.errors)
    # A hop from an earlier failover may still wait for its replay, perhaps from a server that has failed now.
    for link in state.links:
        standing = event.standings.get(link.number)
        if standing is not None and standing.number < link.replayed_number:
            errors[link.number] = SessionLost(f"server {link.name} was not ready yet", link.peer_id, link.span)
    if errors:
        return _after_failure(state, errors, event.is_late)
    runs = tuple(gaps([link.number in state.failed for link in state.links]))
    return _next_gap(replace(state, standings=event.standings, gaps=runs), [])


def _next_gap(state: FailoverState, instructions: list[Instruction]) -> Decision:
    if not state.gaps:
        return state, [*instructions, Resume()]
    state = replace(state, replay=None, is_replica=False)
    if len(state.replaced) == 1:
        return state, [*instructions, AskReplica(state.replaced[0].number)]
    return _open(state, instructions)


def _after_asking_replica(state: FailoverState, event: ReplicaAsked) -> Decision:
    if event.standing is None:
        return _open(state, [])
    progress, after = state.progress, state.after
    before = state.standing(state.before)
    replay = plan_catching_up(event.standing, progress.steps, progress.start, progress.past, before)
    # Lost steps: the replica has computed them, but the next hop has not received their outputs.
    standing_after = state.standing(after)
    received = progress.answered if standing_after is None else standing_after.number
    lost = tuple(step.number for step in progress.steps if received < step.number <= event.standing.number)
    # The client, unlike a hop, cannot have outputs sent again.
    if replay is None or (after is None and lost) or not _fits(replay, progress, event.max_step_tokens):
        return _open(state, [AbandonNew()])
    reroute = after is not None and (bool(lost) or event.next_number != after.number)
    state = replace(state, replay=replay, is_replica=True)
    return state, [UseReplica(_number(after), reroute, lost)]


def _fits(replay: Replay, progress: CallProgress, max_step_tokens: int) -> bool:
    """Return whether the history fits into one step, because only one step number is free for it."""
    start, end = replay.history
    return (end - start) * progress.batch_size <= max(1, max_step_tokens)


def _open(state: FailoverState, instructions: list[Instruction]) -> Decision:
    progress, after = state.progress, state.after
    replay = plan_replay(
        progress.steps, progress.start, state.standing(state.before), state.standing(after), progress.answered
    )
    span = Span(state.replaced[0].span.start, state.replaced[-1].span.end)
    opening = OpenHops(span, state.replaced[0].number, _number(after), replay)
    return replace(state, replay=replay), [*instructions, opening]


def _after_connecting(state: FailoverState, new: tuple[FailoverHop, ...]) -> Decision:
    assert state.replay is not None
    gap, replaced = state.gaps[0], state.replaced
    start, end = state.replay.history
    splice = Splice(gap, state.failed[replaced[0].number], end - start, state.is_replica)
    links = (*state.links[: gap.start], *new, *state.links[gap.stop :])
    return _next_gap(replace(state, links=links, gaps=state.gaps[1:]), [splice])


def _number(link: FailoverHop | None) -> int | None:
    return None if link is None else link.number
