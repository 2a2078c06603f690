"""The choice of a peer's stage when it joins, and its moves to stages where it speeds up the run more."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

from swarm_protocol.net.identity import Identity
from swarm_protocol.process.routine import end_tasks
from swarm_training.core.record import JOINING, LEFT, PRESENT, Progress
from swarm_training.core.signing import sign
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.run.standing import now
from swarm_training.stages.peer.stage_peer import StagePeer
from swarm_training.stages.peer.watch import RunWatch
from swarm_training.stages.placement import stage_choice
from swarm_training.stages.placement.stage_choice import PlacementView

NOISE = 0.2  # relative noise of a peer's measured speed, from one step to the next
_ANNOUNCE_S = 1.5  # between two records on the way to a stage: a peer whose record is not renewed counts as silent
_POLL_S = 0.05


@dataclass(frozen=True)
class PlacementTimes:
    """The times of joining and moving, in seconds; see ``stage_choice``."""

    look_s: float = 5.0  # the time for which a joining peer listens before it chooses
    check_s: tuple[float, float] = stage_choice.CHECK_S
    confirm_s: float = stage_choice.CONFIRM_S
    cooldown_s: float = stage_choice.COOLDOWN_S
    # The longest time for which a leaving peer waits for the end of the step. A round of local steps lasts long, and
    # all of the peer's part of it would be lost: ``inf`` fits such a run.
    step_s: float = 30.0


def stage_view(stages: Sequence[Iterable[Progress]], costs: Sequence[float]) -> PlacementView:
    """Return the view that records give of the peers at each stage and on their way to it. A peer with two records is
    where the newer one is. A peer that has not measured its speed has the average speed of the others."""
    newest: dict[str, tuple[int, Progress]] = {}
    for index, records in enumerate(stages):
        for record in records:
            if record.peer_id not in newest or newest[record.peer_id][1].version < record.version:
                newest[record.peer_id] = index, record
    speeds = {key: peer.samples_per_s * costs[index] for key, (index, peer) in newest.items() if peer.samples_per_s}
    usual = sum(speeds.values()) / len(speeds) if speeds else 1.0
    peers = (
        stage_choice.PlacedPeer(
            key,
            index,
            speeds.get(key, usual),
            peer.state in PRESENT,
            peer.next_stage if peer.next_stage in range(len(costs)) else None,
            peer.may_move,
        )
        for key, (index, peer) in sorted(newest.items())
    )
    return PlacementView(tuple(costs), tuple(peers))


def view_of(watch: RunWatch, costs: Sequence[float]) -> PlacementView:
    return stage_view([watch.placed(index) for index in range(len(costs))], costs)


def margin_of(view: PlacementView) -> float:
    """Return the relative gain of the slowest stage that is worth a move."""
    # The noise of one peer changes the speed of a stage with a usual number of peers by this share.
    return max(stage_choice.MARGIN, NOISE * len(view.costs) / max(1, len(view.peers)))


class Announcements:
    """The records on the DHT by which others know that a peer is on its way to a stage, until it joins the stage."""

    def __init__(self, boards: Mapping[int, DhtPeerRegistry], runs: Sequence[str], identity: Identity) -> None:
        self._boards, self._runs, self._identity = boards, runs, identity

    @asynccontextmanager
    async def on_the_way(self, stage: int) -> AsyncIterator[None]:
        announcing = asyncio.ensure_future(self._announce(stage))
        try:
            yield
        finally:
            await end_tasks([announcing])

    async def withdraw(self, stage: int) -> None:
        record = replace(self._record(stage, time.time_ns() // 1_000_000), state=LEFT)
        await self._boards[stage].publish(sign(record, self._identity))

    async def _announce(self, stage: int) -> None:
        for version in count(time.time_ns() // 1_000_000):  # below that of the record with which the peer joins
            await self._boards[stage].publish(sign(self._record(stage, version), self._identity))
            await asyncio.sleep(_ANNOUNCE_S)

    def _record(self, stage: int, version: int) -> Progress:
        return Progress(self._runs[stage], self._identity.peer_id, version, state=JOINING)


async def choose(
    watch: RunWatch,
    announcements: Announcements,
    own_id: str,
    costs: Sequence[float],
    pace: PlacementTimes = PlacementTimes(),
) -> int:
    """Return the stage that a joining peer takes; ``watch`` runs.

    The peer announces its choice, and chooses again when all peers that join at the same time have heard of each other.
    """
    await watch.look()
    await asyncio.sleep(pace.look_s)
    first = stage_choice.choose_stage(view_of(watch, costs), own_id)
    async with announcements.on_the_way(first):
        await asyncio.sleep(pace.confirm_s)
        await watch.look()
    chosen = stage_choice.choose_stage(view_of(watch, costs), own_id)
    if chosen != first:
        await announcements.withdraw(first)
    return chosen


class StageChooser:
    """The choice of the next stage of a peer that may work at any stage."""

    def __init__(
        self,
        peer: StagePeer,
        costs: Sequence[float],
        pace: PlacementTimes = PlacementTimes(),
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._peer, self._costs, self._pace, self._uniform = peer, costs, pace, uniform
        self._own_id = peer.peer.own.peer_id

    async def next_stage(self) -> int:
        """Wait until the peer is to leave for another stage at once, and return that stage."""
        await asyncio.sleep(self._pace.cooldown_s)
        self._peer.peer.shows_move(may_move=True)
        while True:
            await asyncio.sleep(self._uniform(*self._pace.check_s))
            await self._peer.watch.look()
            view = self._view()
            to = stage_choice.own_move(view, self._own_id, margin_of(view))
            if to is None:
                continue
            self._peer.peer.shows_move(may_move=True, next_stage=to)
            await asyncio.sleep(self._pace.confirm_s)
            await self._peer.watch.look()
            if await self._reaches_end_of_step(to):
                return to
            self._peer.peer.shows_move(may_move=True)

    async def _reaches_end_of_step(self, to: int) -> bool:
        """Return True when the peer may leave, False if the move helps no more.

        Trainers must replay the micro-batches that leave with the peer. Hence it waits up to ``step_s`` until it has
        none, or they are averaged. It does not wait if the next stage has no peer: the run stands still then."""
        deadline_s = now() + self._pace.step_s
        while stage_choice.may_go(view := self._view(), self._own_id, margin_of(view)):
            own = self._peer.peer.own
            is_time = not own.samples or own.decided or not self._peer.watch.records(to) or now() > deadline_s
            if is_time and self._peer.may_leave:
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def _view(self) -> PlacementView:
        return view_of(self._peer.watch, self._costs)
