"""Which stage a peer works at, and when it moves to another. Pure: functions of what the run looks like.

A run takes as many micro-batches per second as its slowest stage. So who joins takes the slowest stage, and peers move
from faster stages to the slowest one, as in SWARM (Ryabinin et al., 2023, algorithm 2). There one peer moves at a time;
here all peers find the same plan in the same view, of as many moves as help, so that a stage that has lost many peers
at once is filled at once.

A move helps if both stages are then faster, by a margin, than the one that gains was before. Hence no move lowers
the minimum, moves end (each makes the sorted list of the stages' speeds larger, lexicographically), and a move back
does not help unless something else has changed. Who has moved or joined stays for ``COOLDOWN_S`` at least. A peer says
where it will go, looks again ``CONFIRM_S`` later, and goes only if its move helps even after those that peers with
lower ids have announced.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

MARGIN = 0.01  # what the slowest stage must gain, relative: less is not worth loading another stage's state
CHECK_S = (15.0, 30.0)  # a peer asks itself so often whether it should move, at random intervals between the two
CONFIRM_S = 2.0  # after saying where it will go, a peer looks whether that still helps
COOLDOWN_S = 60.0  # a peer stays so long at a stage, counted from when it began to work there


@dataclass(frozen=True)
class StagePeer:
    """What a peer says of itself.

    Attributes:
        speed: what its stage gains by it; micro-batches per second at a stage of cost 1.
        is_working: it has loaded the stage's state; else it is on its way there.
        next_stage: where it has said that it will go; None: it stays.
        may_move: it is free to, and has been at its stage for ``COOLDOWN_S``.
    """

    peer_id: str
    stage: int
    speed: float
    is_working: bool = True
    next_stage: int | None = None
    may_move: bool = True


@dataclass(frozen=True)
class StageView:
    """The peers of a run, as somebody sees them.

    Attributes:
        costs: of a micro-batch at each stage, relative to one another; the first and the last stage do more than their
            blocks. As many as there are stages.
    """

    costs: tuple[float, ...]
    peers: tuple[StagePeer, ...]

    def __post_init__(self) -> None:
        """Raises ValueError if a peer is at no stage of the run, or a cost or speed is not positive."""
        if not self.costs or min(self.costs) <= 0:
            raise ValueError(f"the costs of stages are {self.costs}: expected at least one, all above 0")
        for peer in self.peers:
            if not all(0 <= stage < len(self.costs) for stage in (peer.stage, peer.next_stage or 0)):
                raise ValueError(f"{peer.peer_id} is at no stage of the run, which has {len(self.costs)}")
            if not peer.speed > 0:
                raise ValueError(f"the speed of {peer.peer_id} is {peer.speed}: expected more than 0")

    @classmethod
    def of(cls, num_stages: int, peers: Iterable[StagePeer]) -> StageView:
        """With stages of equal cost."""
        return cls((1.0,) * num_stages, tuple(peers))


@dataclass(frozen=True)
class StageMove:
    """A peer is to work at another stage."""

    peer_id: str
    since: int
    to: int


def stage_speeds(view: StageView) -> list[float]:
    """Micro-batches per second of each stage, by the peers that work there now."""
    return _speeds(view.costs, [(peer.stage, peer.speed) for peer in view.peers if peer.is_working])


def choose_stage(view: StageView, peer_id: str) -> int:
    """The stage that a peer takes when it joins: the slowest, of equals the first.

    Of those that are on their way somewhere, it heeds the ones with lower peer ids: when all have read what the others
    chose and have chosen again, they are spread. Who will leave a stage counts where it goes.
    """
    heeded = [peer for peer in view.peers if peer.is_working or peer.peer_id < peer_id]
    speeds = _speeds(view.costs, [(_destination(peer), peer.speed) for peer in heeded if peer.peer_id != peer_id])
    return speeds.index(min(speeds))


def plan_moves(view: StageView, margin: float = MARGIN) -> tuple[StageMove, ...]:
    """Moves after which no further one helps; each raises the slowest stage, or one of several that are equally slow.

    Everybody finds the same moves in the same view. Those that are on their way or have announced a move count where
    they go, and are not moved again.
    """
    speeds = _speeds(view.costs, [(_destination(peer), peer.speed) for peer in view.peers])
    movable: list[list[tuple[float, str]]] = [[] for _ in view.costs]  # of each stage, slow peers first
    for peer in view.peers:
        if peer.may_move and peer.is_working and peer.next_stage is None:
            movable[peer.stage].append((peer.speed, peer.peer_id))
    for peers in movable:
        peers.sort()
    moves = []
    while found := _best_move(view.costs, speeds, movable, margin):
        since, to, index = found
        speed, peer_id = movable[since].pop(index)
        speeds[since] -= speed / view.costs[since]
        speeds[to] += speed / view.costs[to]
        moves.append(StageMove(peer_id, since, to))
    return tuple(moves)


def own_move(view: StageView, peer_id: str, margin: float = MARGIN) -> int | None:
    """The stage to which the peer is to go, and to say so now; None: it stays.

    Where the plan sends it, unless others must come to its stage first.
    """
    return next(
        (
            move.to
            for move in plan_moves(view, margin)
            if move.peer_id == peer_id and _can_be_spared(view, peer_id, announced=())
        ),
        None,
    )


def may_go(view: StageView, peer_id: str, margin: float = MARGIN) -> bool:
    """Whether a peer that has said where it will go may leave its stage now.

    Moves that were announced are taken in the order of peer ids, as far as they still help.
    """
    announced = sorted(
        (peer for peer in view.peers if peer.is_working and peer.next_stage is not None), key=lambda peer: peer.peer_id
    )
    ids = {peer.peer_id for peer in announced}
    speeds = _speeds(
        view.costs,
        [(peer.stage if peer.peer_id in ids else _destination(peer), peer.speed) for peer in view.peers],
    )
    going: list[str] = []
    for peer in announced:
        assert peer.next_stage is not None
        gain, loss = peer.speed / view.costs[peer.next_stage], peer.speed / view.costs[peer.stage]
        after = min(speeds[peer.stage] - loss, speeds[peer.next_stage] + gain)
        helps = peer.stage != peer.next_stage and after > speeds[peer.next_stage] * (1 + margin)
        if helps and _can_be_spared(view, peer.peer_id, going):
            speeds[peer.stage] -= loss
            speeds[peer.next_stage] += gain
            going.append(peer.peer_id)
        if peer.peer_id == peer_id:
            return going[-1:] == [peer_id]
    return False


def _can_be_spared(view: StageView, peer_id: str, announced: Sequence[str]) -> bool:
    """Whether its stage stays as fast as the slowest is now, while it and those before it are on their way."""
    away = {peer_id, *announced}
    staying = replace(view, peers=tuple(peer for peer in view.peers if peer.peer_id not in away))
    (stage,) = [peer.stage for peer in view.peers if peer.peer_id == peer_id]
    return stage_speeds(staying)[stage] >= min(stage_speeds(view)) and any(
        peer.stage == stage and peer.is_working for peer in staying.peers
    )


def _best_move(
    costs: Sequence[float], speeds: Sequence[float], movable: Sequence[list[tuple[float, str]]], margin: float
) -> tuple[int, int, int] | None:
    """(from which stage, to which, which of its movable peers): the one to the slowest stage after which it and the
    stage that gives are fastest; of equals, that from the fastest stage, then from the first, of the lowest peer id."""
    to = min(range(len(costs)), key=lambda stage: (speeds[stage], stage))
    best: tuple[tuple[float, float], int, int] | None = None
    for since, peers in enumerate(movable):
        if since == to or not peers:
            continue
        # Of peers from slow to fast, min(what the one keeps, what the other gets) rises and then falls.
        ideal = (speeds[since] - speeds[to]) / (1 / costs[since] + 1 / costs[to])
        around = bisect_left(peers, (ideal, ""))
        for place in (around - 1, around):
            if not 0 <= place < len(peers):
                continue
            speed = peers[place][0]
            index = bisect_left(peers, (speed, ""))  # the lowest peer id of those that are as fast
            after = min(speeds[since] - speed / costs[since], speeds[to] + speed / costs[to])
            rank = (after, speeds[since])
            if after > speeds[to] * (1 + margin) and (best is None or rank > best[0]):
                best = rank, since, index
    return None if best is None else (best[1], to, best[2])


def _destination(peer: StagePeer) -> int:
    return peer.stage if peer.next_stage is None else peer.next_stage


def _speeds(costs: Sequence[float], placed: Iterable[tuple[int, float]]) -> list[float]:
    sums = [0.0] * len(costs)
    for stage, speed in placed:
        sums[stage] += speed
    return [total / cost for total, cost in zip(sums, costs, strict=True)]
