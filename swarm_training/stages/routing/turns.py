"""The division of micro-batches among trainers, and how many each trainer has under way. Pure.

All trainers of a run share the micro-batches of a step by their rank among those that live. Two trainers that compute
the same micro-batch do not harm the model, but cost a peer its sums. Hence a trainer leaves the micro-batches of
another trainer alone until nothing has happened for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Turn:
    """A trainer's rank, 0..count − 1, among ``count`` trainers."""

    rank: int = 0
    count: int = 1

    def has(self, number: int) -> bool:
        return number % self.count == self.rank


def turn_of(own_id: str, trainers: Mapping[str, int], step: int) -> Turn | None:
    """Return the turn of this trainer at a step, or None while it takes no part.

    If all trainers at this step have gone, the newcomers with the earliest first step take part at once.

    ``trainers``: the step from which on each trainer takes part, by peer id.
    """
    earliest = max(step, min(trainers.values(), default=step))
    present = sorted(peer_id for peer_id, first_step in trainers.items() if first_step <= earliest)
    return Turn(present.index(own_id), len(present)) if own_id in present else None


def next_ones(lacking: Iterable[int], under_way: Collection[int], turn: Turn | None, is_stalled: bool) -> list[int]:
    """Return the micro-batches to begin, in order. ``is_stalled``: include those of other trainers, after one's own."""
    waiting = sorted(set(lacking) - set(under_way))
    own = [number for number in waiting if turn is not None and turn.has(number)]
    if not is_stalled:
        return own
    others = [number for number in waiting if number not in own]
    first = turn.rank if turn is not None else 0  # trainers that see the same stall begin at different places
    start = len(others) * first // (turn.count if turn is not None else 1)
    return own + others[start:] + others[:start]


def window(num_peers: int, num_trainers: int, per_peer: float, most: int) -> int:
    """Return how many micro-batches a trainer has under way, so that each peer has one to compute while others wait."""
    return max(1, min(most, ceil(per_peer * num_peers / num_trainers)))
