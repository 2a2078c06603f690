"""The choice of a peer's stage, and of its moves to another. Pure functions of a view of the run.

A run takes as many micro-batches per second as its slowest stage. Hence a joining peer takes the slowest stage, and
peers move from faster stages to the slowest one, as in SWARM (Ryabinin et al., 2023, algorithm 2). There one peer moves
at a time. Here all peers find the same plan in the same view, of as many moves as help. Hence a stage that has lost
many peers at once is filled at once.

A move helps if both stages are then faster, by a margin, than the stage that gains was before. Hence no move lowers
the minimum, and moves end: each makes the sorted list of the stages' speeds larger, lexicographically. A move back
does not help unless something else has changed. A peer that has moved or joined stays for ``COOLDOWN_S`` at least. It
announces where it will go, and looks again ``CONFIRM_S`` later. It goes only if its move helps even after the moves
that peers with lower ids have announced.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

MARGIN = 0.01  # relative gain of the slowest stage: a smaller one is not worth loading another stage's state
CHECK_S = (15.0, 30.0)  # the least and the longest time between two checks whether to move, drawn at random
CONFIRM_S = 2.0  # the time after which a peer checks whether its announced move still helps
COOLDOWN_S = 60.0  # the least time for which a peer stays at a stage, once it works there


@dataclass(frozen=True)
class PlacedPeer:
    """The state of a peer, by its own report."""

    peer_id: str
    stage: int
    speed: float  # the speed that its stage gains by it: micro-batches per second at a stage of cost 1
    is_working: bool = True  # whether it has loaded the stage's state; else it is on its way there
    next_stage: int | None = None  # the stage to which it has announced a move; None: it stays
    may_move: bool = True  # whether it is free to move, and has been at its stage for ``COOLDOWN_S``


@dataclass(frozen=True)
class PlacementView:
    """The peers of a run, as one process sees them. ``costs``: the relative cost of a micro-batch at each stage, above
    0; the first and the last one do more than their blocks."""

    costs: tuple[float, ...]
    peers: tuple[PlacedPeer, ...]


@dataclass(frozen=True)
class StageMove:
    """A move of a peer from stage ``since`` to stage ``to``."""

    peer_id: str
    since: int
    to: int


def stage_speeds(view: PlacementView) -> list[float]:
    """Return the micro-batches per second of each stage, by the peers that work there now."""
    return _speeds(view.costs, [(peer.stage, peer.speed) for peer in view.peers if peer.is_working])


def choose_stage(view: PlacementView, peer_id: str) -> int:
    """Return the stage that a joining peer takes: the slowest one, or the first of several equally slow ones.

    The peer also counts peers on their way to a stage if their ids are lower. Once all joining peers have read what the
    others chose and have chosen again, they are spread. A peer that will leave a stage counts where it goes.
    """
    heeded = [peer for peer in view.peers if peer.is_working or peer.peer_id < peer_id]
    speeds = _speeds(view.costs, [(_destination(peer), peer.speed) for peer in heeded if peer.peer_id != peer_id])
    return speeds.index(min(speeds))


def plan_moves(view: PlacementView, margin: float = MARGIN) -> tuple[StageMove, ...]:
    """Return moves after which no further one helps. Each raises the slowest stage, or one of several equally slow
    ones.

    All peers find the same moves in the same view. Peers that are on their way or have announced a move count where
    they go, and are not moved again.
    """
    speeds = _speeds(view.costs, [(_destination(peer), peer.speed) for peer in view.peers])
    movable: list[list[tuple[float, str]]] = [[] for _ in view.costs]  # by stage, slow peers first
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


def own_move(view: PlacementView, peer_id: str, margin: float = MARGIN) -> int | None:
    """Return the stage to which the peer is to go, and announce its move, now; None: it stays.

    This is where the plan sends it, unless other peers must come to its stage first.
    """
    return next(
        (
            move.to
            for move in plan_moves(view, margin)
            if move.peer_id == peer_id and _can_be_spared(view, peer_id, announced=())
        ),
        None,
    )


def may_go(view: PlacementView, peer_id: str, margin: float = MARGIN) -> bool:
    """Return whether a peer that has announced a move may leave its stage now.

    Announced moves are taken in the order of peer ids, as far as they still help.
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


def _can_be_spared(view: PlacementView, peer_id: str, announced: Sequence[str]) -> bool:
    """Return whether the stage stays as fast as the slowest is now, without the peer and those in ``announced``."""
    away = {peer_id, *announced}
    staying = replace(view, peers=tuple(peer for peer in view.peers if peer.peer_id not in away))
    (stage,) = [peer.stage for peer in view.peers if peer.peer_id == peer_id]
    return stage_speeds(staying)[stage] >= min(stage_speeds(view)) and any(
        peer.stage == stage and peer.is_working for peer in staying.peers
    )


def _best_move(
    costs: Sequence[float], speeds: Sequence[float], movable: Sequence[list[tuple[float, str]]], margin: float
) -> tuple[int, int, int] | None:
    """Return the best move as (giving stage, gaining stage, index of the giver's movable peer); None if none helps. The
    slowest stage gains, and the smaller of both new speeds is the largest possible. Among equal moves, the fastest
    giver comes first, then the first stage, then the lowest peer id."""
    to = min(range(len(costs)), key=lambda stage: (speeds[stage], stage))
    best: tuple[tuple[float, float], int, int] | None = None
    for since, peers in enumerate(movable):
        if since == to or not peers:
            continue
        # Along the peers from slow to fast, min(giver's new speed, gainer's new speed) rises and then falls.
        ideal = (speeds[since] - speeds[to]) / (1 / costs[since] + 1 / costs[to])
        around = bisect_left(peers, (ideal, ""))
        for place in (around - 1, around):
            if not 0 <= place < len(peers):
                continue
            speed = peers[place][0]
            index = bisect_left(peers, (speed, ""))  # the lowest peer id among equally fast peers
            after = min(speeds[since] - speed / costs[since], speeds[to] + speed / costs[to])
            rank = (after, speeds[since])
            if after > speeds[to] * (1 + margin) and (best is None or rank > best[0]):
                best = rank, since, index
    return None if best is None else (best[1], to, best[2])


def _destination(peer: PlacedPeer) -> int:
    return peer.stage if peer.next_stage is None else peer.next_stage


def _speeds(costs: Sequence[float], placed: Iterable[tuple[int, float]]) -> list[float]:
    sums = [0.0] * len(costs)
    for stage, speed in placed:
        sums[stage] += speed
    return [total / cost for total, cost in zip(sums, costs, strict=True)]
