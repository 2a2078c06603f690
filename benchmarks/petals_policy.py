"""The policy Petals documents for choosing blocks, as we read its code: what our placement is compared with. Pure.

A server takes the window whose block throughputs, sorted, are lexicographically lowest; a block's throughput is the sum
over the servers that hold it, each through its whole span. Now and then it imagines that it takes the best window once
more, then all others in random order until nobody would move, and moves if the lowest block's throughput is now less
than ``BALANCE_QUALITY`` of what it would then be; never if that would leave a block without a server.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from swarm_protocol.span import Span

BALANCE_QUALITY = 0.75
CHECK_S = (0.0, 240.0)  # 120 in the mean
CHOICE_S = (0.0, 10.0)  # waits so long before it chooses, also when it moves
_MOST_ROUNDS = 50  # of imagined moves; Petals sets no limit
_SLIGHTLY = 1e-3  # so much more is taken away than a server has, so that it stays where it is among equals


@dataclass(frozen=True)
class Placed:
    """A server that is there or comes: where, and its tokens per second through its whole span."""

    span: Span
    tokens_per_s: float


def block_sums(servers: Mapping[str, Placed], num_blocks: int) -> np.ndarray:
    sums = np.zeros(num_blocks)
    for server in servers.values():
        sums[server.span.start : server.span.end] += server.tokens_per_s
    return sums


def best_window(sums: np.ndarray, length: int) -> Span:
    lowest = sums[_windows(len(sums), length)].min(1)
    (ties,) = np.nonzero(lowest == lowest.min())
    start = ties[0] if len(ties) == 1 else min(ties, key=lambda first: sorted(sums[first : first + length].tolist()))
    return Span(int(start), int(start) + length)


def wants_to_move(servers: Mapping[str, Placed], peer_id: str, sums: np.ndarray) -> bool:
    """Whether it would not come back to its window, and could leave it: what it asks before it imagines the others."""
    without = sums.copy()
    _take_away(without, servers[peer_id])
    if sums.min() > _SLIGHTLY and without.min() <= 0:
        return False
    return best_window(without, len(servers[peer_id].span)) != servers[peer_id].span


def settled(servers: Mapping[str, Placed], first: str, num_blocks: int, chance: random.Random) -> float:
    """The lowest block's throughput once everybody, from ``first`` on, has taken the best window until nobody moves."""
    spans = {peer_id: server.span for peer_id, server in servers.items()}
    sums = block_sums(servers, num_blocks)
    order = [first]
    for _ in range(_MOST_ROUNDS):
        moved = False
        for peer_id in order:
            here = Placed(spans[peer_id], servers[peer_id].tokens_per_s)
            _take_away(sums, here)
            spans[peer_id] = best_window(sums, len(here.span))
            sums[here.span.start : here.span.end] += here.tokens_per_s * _SLIGHTLY
            sums[spans[peer_id].start : spans[peer_id].end] += here.tokens_per_s
            moved |= spans[peer_id] != here.span
        if not moved and len(order) == len(servers):
            break
        order = list(servers)
        chance.shuffle(order)
    return float(sums.min())


def is_unbalanced(lowest_now: float, lowest_settled: float) -> bool:
    if lowest_settled < max(lowest_now, _SLIGHTLY):
        return False
    return lowest_now / lowest_settled < BALANCE_QUALITY - _SLIGHTLY


def _take_away(sums: np.ndarray, server: Placed) -> None:
    sums[server.span.start : server.span.end] -= server.tokens_per_s * (1 + _SLIGHTLY)


@lru_cache
def _windows(num_blocks: int, length: int) -> np.ndarray:
    """[window, block of it]"""
    return np.arange(num_blocks - length + 1)[:, None] + np.arange(length)
