"""Where a peer works: it chooses a stage when it joins, and moves when the run takes more micro-batches for it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

from swarm_protocol.net.identity import Identity
from swarm_stages.peer.stage_peer import StagePeer
from swarm_stages.peer.watch import Watch
from swarm_stages.placement import stage_choice
from swarm_stages.placement.stage_choice import StageView
from swarm_training.core.record import JOINING, LEFT, PRESENT, Progress
from swarm_training.core.signing import sign
from swarm_training.progress.board import Board
from swarm_training.run.standing import now

NOISE = 0.2  # of a peer's measured speed, from one step to the next
_ANNOUNCE_S = 1.5  # a record that is not renewed is taken for that of somebody silent
_POLL_S = 0.05


@dataclass(frozen=True)
class Pace:
    """In seconds; see ``stage_choice``.

    Attributes:
        look_s: that somebody who joins listens before it chooses.
        step_s: that somebody who goes waits for the end of the step.
    """

    look_s: float = 5.0
    check_s: tuple[float, float] = stage_choice.CHECK_S
    confirm_s: float = stage_choice.CONFIRM_S
    cooldown_s: float = stage_choice.COOLDOWN_S
    step_s: float = 30.0


def stage_view(stages: Sequence[Iterable[Progress]], costs: Sequence[float]) -> StageView:
    """What records say, of those at each stage and on their way to it. Who has two is where the newer one is; who has
    not measured its speed is as fast as the others are on average."""
    newest: dict[str, tuple[int, Progress]] = {}
    for index, records in enumerate(stages):
        for record in records:
            if record.peer_id not in newest or newest[record.peer_id][1].version < record.version:
                newest[record.peer_id] = index, record
    speeds = {key: peer.samples_per_s * costs[index] for key, (index, peer) in newest.items() if peer.samples_per_s}
    usual = sum(speeds.values()) / len(speeds) if speeds else 1.0
    peers = (
        stage_choice.StagePeer(
            key,
            index,
            speeds.get(key, usual),
            peer.state in PRESENT,
            peer.next_stage if peer.next_stage in range(len(costs)) else None,
            peer.may_move,
        )
        for key, (index, peer) in sorted(newest.items())
    )
    return StageView(tuple(costs), tuple(peers))


def view_of(watch: Watch, costs: Sequence[float]) -> StageView:
    return stage_view([watch.placed(index) for index in range(len(costs))], costs)


def margin_of(view: StageView) -> float:
    """What the slowest stage must gain, relative, for a move to be worth it: more than measuring once more may give."""
    return max(stage_choice.MARGIN, NOISE * len(view.costs) / max(1, len(view.peers)))


class Announcements:
    """Says on the DHT that this peer is on its way to a stage, as long as nothing there says it otherwise."""

    def __init__(self, boards: Mapping[int, Board], runs: Sequence[str], identity: Identity) -> None:
        self._boards, self._runs, self._identity = boards, runs, identity

    @asynccontextmanager
    async def on_the_way(self, stage: int) -> AsyncIterator[None]:
        announcing = asyncio.ensure_future(self._announce(stage))
        try:
            yield
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    async def withdraw(self, stage: int) -> None:
        record = replace(self._record(stage, time.time_ns() // 1_000_000), state=LEFT)
        await self._boards[stage].publish(sign(record, self._identity))

    async def _announce(self, stage: int) -> None:
        for version in count(time.time_ns() // 1_000_000):
            await self._boards[stage].publish(sign(self._record(stage, version), self._identity))
            await asyncio.sleep(_ANNOUNCE_S)

    def _record(self, stage: int, version: int) -> Progress:
        return Progress(self._runs[stage], self._identity.peer_id, version, state=JOINING)


async def choose(
    watch: Watch, announcements: Announcements, own_id: str, costs: Sequence[float], pace: Pace = Pace()
) -> int:
    """The stage that somebody who joins takes; ``watch`` runs.

    It says which one, and chooses again when all who join at the same time have heard of each other.
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


class Mover:
    """Of a peer that may work at any stage."""

    def __init__(
        self,
        peer: StagePeer,
        costs: Sequence[float],
        pace: Pace = Pace(),
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._peer, self._costs, self._pace, self._uniform = peer, costs, pace, uniform
        self._own_id = peer.peer.own.peer_id

    async def next_stage(self) -> int:
        """Waits until the peer is to leave for another stage at once, and returns which."""
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
        """False if the move helps no more. What the peer has added up, trainers must replay when it leaves: it leaves
        when that is nothing, but without delay if nobody is where it goes."""
        deadline_s = now() + self._pace.step_s
        while stage_choice.may_go(view := self._view(), self._own_id, margin_of(view)):
            own = self._peer.peer.own
            is_time = not own.samples or own.decided or not self._peer.watch.records(to) or now() > deadline_s
            if is_time and self._peer.may_leave:
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def _view(self) -> StageView:
        return view_of(self._peer.watch, self._costs)
