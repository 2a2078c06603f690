"""The blocks that a server should host, and the moves to others, as pure functions of a view of the swarm.

The criterion is the throughput of the swarm (``capacity.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np

from swarm_protocol.dht.records import ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_server.placement.capacity import EQUAL, Balance, Coverage, SpanChange

T = TypeVar("T")
MARGIN = 0.03  # the relative gain of throughput that is worth a move
CHECK_S = (8.0, 20.0)  # a server checks whether it should move at random intervals between these two
CONFIRM_S = 2.0  # from announcing a move until a server checks whether others want to leave the same blocks
URGENT_DRAIN_S = 5.0  # for sessions to end or move when blocks are missing elsewhere: few sessions can continue anyhow
_MAX_MOVES = 2048  # of one plan; further moves are planned later
_MAX_CANDIDATES = 512  # moves that are compared with one another
_WINDOWS_EACH = 4  # of one server, if there are too many to try all
_MAX_TOGETHER = 256  # moves made without another comparison
_MAX_PAIRS = 2048


@dataclass(frozen=True)
class PlannedMove:
    """A planned move: one server is to host other blocks."""

    peer_id: str
    to: Span


def choose_span(view: SwarmView, num_blocks: int, num_hosted: int, tokens_per_s: float = 0.0) -> Span:
    """Return the window of ``num_hosted`` blocks where one more server helps the swarm most.

    The highest throughput of the swarm decides; while blocks are missing, the most of them found. Among equals, the
    lexicographically lowest sorted list of block throughputs decides, then the first window. A block's throughput is
    the sum over the servers that hold the block. Joining servers count as well, leaving ones do not.

    Args:
        tokens_per_s: the speed of the new server through that many blocks; 0 means unknown: the median is assumed.
    """
    layout = Coverage.of(view, num_blocks)
    num_hosted = min(num_hosted, num_blocks)
    speed = tokens_per_s * num_hosted or layout.usual_speed
    windows = [Span(start, start + num_hosted) for start in range(num_blocks - num_hosted + 1)]
    best = _best(*layout.balances_with([[SpanChange(speed, None, window)] for window in windows]))
    sums = layout.block_sums()
    return min((windows[i] for i in best), key=lambda window: sorted(sums[window.start : window.end]))


def others_first(view: SwarmView, peer_id: str) -> SwarmView:
    """Return the part of the view that a joining server considers, so that joining servers choose different blocks.

    This part leaves out the server itself, and joining servers with a higher peer id. After all have read the choices
    of the others and chosen again, each has a place of its own.
    """
    return SwarmView(
        tuple(
            server
            for server in view.servers
            if server.peer_id != peer_id and (server.state is not ServerState.JOINING or server.peer_id < peer_id)
        )
    )


def plan_moves(view: SwarmView, num_blocks: int, margin: float = MARGIN) -> tuple[PlannedMove, ...]:
    """Return moves that together raise the throughput by more than ``margin``, relative, or none if there are none.

    All servers find the same moves in the same view: repeatedly the most helpful ones, until none helps. Last moves
    that bring less than ``margin`` are left out, so that a swarm comes to rest. Servers that are pinned, not ONLINE, or
    already moving stay.
    """
    layout = Coverage.of(view, num_blocks)
    moves: list[PlannedMove] = []
    now = reached = layout.balance()
    num_kept = 0
    while len(moves) < _MAX_MOVES and now.tokens_per_s * (1 + margin) < layout.upper_bound():
        found = _helpful_moves(layout, now)
        if found is None:
            break
        steps, layout, now = found
        moves += [PlannedMove(layout.peer_ids[index], to) for index, to in steps]
        if now.num_missing < reached.num_missing or now.tokens_per_s > reached.tokens_per_s * (1 + margin):
            reached, num_kept = now, len(moves)
    return tuple(moves[:num_kept])


def own_move(view: SwarmView, peer_id: str, num_blocks: int, margin: float = MARGIN) -> Span | None:
    """Return the span that the plan gives the server now; None to stay, or if others must come to its blocks first."""
    moves = plan_moves(view, num_blocks, margin)
    destinations = [move.to for move in moves if move.peer_id == peer_id]
    if destinations and (_others_hold_all(view, peer_id, num_blocks) or _closes_gaps(view, moves, num_blocks)):
        return destinations[-1]
    return None


def may_leave(view: SwarmView, peer_id: str, num_blocks: int, margin: float = MARGIN) -> bool:
    """Return whether a server that has announced its next span may leave its blocks without opening a gap.

    Servers that have not announced to leave must hold all its blocks. If two want to leave the same blocks,
    neither goes, and both try again at other times. While blocks are missing, nothing passes through the swarm; then
    the server may also go if the planned moves lead to a swarm without gaps.
    """
    return _others_hold_all(view, peer_id, num_blocks) or _closes_gaps(
        view, plan_moves(view, num_blocks, margin), num_blocks
    )


def _others_hold_all(view: SwarmView, peer_id: str, num_blocks: int) -> bool:
    others = [server for server in view.servers if server.peer_id != peer_id and server.next_span is None]
    held = SwarmView(tuple(others)).replicas(num_blocks)
    spans = [server.span for server in view.servers if server.peer_id == peer_id]
    return all(held[block] for span in spans for block in span)


def _closes_gaps(view: SwarmView, moves: Sequence[PlannedMove], num_blocks: int) -> bool:
    """Return whether blocks are missing now, and none will be after these moves and those under way."""
    present = [server for server in view.servers if server.state is not ServerState.JOINING]
    if all(any(block in server.span for server in present) for block in range(num_blocks)):
        return False
    layout = Coverage.of(view, num_blocks)
    indices = {peer_id: index for index, peer_id in enumerate(layout.peer_ids)}
    return not layout.moved((indices[move.peer_id], move.to) for move in moves).balance().num_missing


# ---------------------------------------------------------------- planning

_Steps = list[tuple[int, Span]]  # of servers, by their index in the layout


def _helpful_moves(layout: Coverage, now: Balance) -> tuple[_Steps, Coverage, Balance] | None:
    """Return the most helpful move; in a large swarm, as many of the best moves of different servers as help together.

    If no single move of a small swarm helps, return two moves that help together.
    """
    candidates = _candidates(layout, now.bottleneck)
    if not candidates:
        return None
    throughputs, bottlenecks = layout.balances_with([[_change(layout, *step)] for step in candidates])
    steps = _best_of_each(candidates, throughputs, bottlenecks.sum(1))
    most = min(len(steps), max(1, min(_MAX_TOGETHER, len(layout.peer_ids) // 50)))
    sizes = [size for size in (2**power for power in range(20)) if size <= most]
    found = None
    for size in sizes:
        after = layout.moved(steps[:size])
        balance = after.balance()
        if not balance.is_better_than(found[2] if found else now):
            break
        found = steps[:size], after, balance
    return found or _helpful_pair(layout, now, candidates)


def _helpful_pair(layout: Coverage, now: Balance, candidates: _Steps) -> tuple[_Steps, Coverage, Balance] | None:
    """Return the best two moves of different servers if they help together, else None. Do not look in a large swarm."""
    pairs = [pair for pair in combinations(candidates, 2) if pair[0][0] != pair[1][0]] if len(candidates) < 300 else []
    if not pairs:
        return None
    pairs = _spread(pairs, _MAX_PAIRS)
    results = layout.balances_with([[_change(layout, *step) for step in pair] for pair in pairs])
    steps = list(pairs[_best(*results)[0]])
    after = layout.moved(steps)
    balance = after.balance()
    return (steps, after, balance) if balance.is_better_than(now) else None


def _candidates(layout: Coverage, bottleneck: np.ndarray) -> _Steps:
    """Return moves that may help: all of them, or a selection in a large swarm.

    Only a server that holds nothing of the bottleneck can add to it. Among servers with the same span, some are tried,
    from slow to fast, at some of the windows that hold most of the bottleneck.
    """
    if int((layout.num_blocks - layout.lengths[layout.movable]).sum()) <= _MAX_CANDIDATES:
        movers, num_windows = np.flatnonzero(layout.movable).tolist(), layout.num_blocks
    else:
        held = np.concatenate([[0], bottleneck.cumsum()])
        donors = np.flatnonzero(layout.movable & (held[layout.ends] == held[layout.starts]))
        by_span: dict[Span, list[int]] = {}
        for index in donors[np.argsort(layout.speeds[donors], kind="stable")].tolist():
            by_span.setdefault(layout.span(index), []).append(index)
        num_movers, num_windows = _MAX_CANDIDATES // _WINDOWS_EACH, _WINDOWS_EACH
        num_each = max(1, num_movers // max(1, len(by_span)))
        movers = _spread([index for group in by_span.values() for index in _spread(group, num_each)], num_movers)
    return [
        (index, window)
        for index in movers
        for window in _windows(bottleneck, int(layout.lengths[index]), num_windows)
        if window.start != layout.starts[index]
    ]


def _windows(bottleneck: np.ndarray, length: int, num_windows: int) -> list[Span]:
    """Return at most ``num_windows`` windows with most of the bottleneck, or all windows if there are not more."""
    before = np.concatenate([[0], bottleneck.cumsum()])
    held = before[length:] - before[:-length]
    starts = range(len(held)) if num_windows >= len(held) else np.flatnonzero(held == held.max()).tolist()
    return [Span(start, start + length) for start in _spread(starts, num_windows)]


def _change(layout: Coverage, index: int, to: Span) -> SpanChange:
    return SpanChange(float(layout.speeds[index]), layout.span(index), to)


def _best_of_each(candidates: _Steps, throughputs: np.ndarray, sizes: np.ndarray) -> _Steps:
    """Return one step of each server, the best first. Equal steps alternate, so that servers go to different blocks."""
    steps: dict[int, list[tuple[float, int, Span]]] = {}
    for (index, to), throughput, size in zip(candidates, throughputs.tolist(), sizes.tolist(), strict=True):
        steps.setdefault(index, []).append((throughput, size, to))
    chosen = []
    for turn, (index, options) in enumerate(steps.items()):
        highest = max(throughput for throughput, _, _ in options)
        equal = [option for option in options if option[0] >= highest * (1 - EQUAL)]
        narrowest = min(size for _, size, _ in equal)
        equal = [option for option in equal if option[1] == narrowest]
        chosen.append((index, equal[turn % len(equal)]))
    chosen.sort(key=lambda step: (-step[1][0], step[1][1]))
    return [(index, to) for index, (_, _, to) in chosen]


def _best(throughputs: np.ndarray, bottlenecks: np.ndarray) -> list[int]:
    """Return the indices with the highest throughput, and among these the narrowest bottleneck."""
    sizes = bottlenecks.sum(1)
    highest = throughputs >= throughputs.max() * (1 - EQUAL)
    best: list[int] = np.flatnonzero(highest & (sizes == sizes[highest].min())).tolist()
    return best


def _spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most ``count`` items: the first, the last, and evenly spaced ones between."""
    if len(items) <= count:
        return list(items)
    return [items[i] for i in sorted({round(i * (len(items) - 1) / max(1, count - 1)) for i in range(count)})]
