"""The vote on several answers to one question. Pure."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

MOST_ANSWERS = 5  # the most answers to ask for if two differ: three outvote two that lie together


def majority(num_answers: int, agreeing: Collection[tuple[int, int]], least: int = 2) -> frozenset[int] | None:
    """Return the largest set of answers that all agree with one another; None if there is no such majority.

    Args:
        num_answers: the number of answers, which are numbered from 0.
        agreeing: the pairs of answers that agree, the lower number first.
        least: how many must agree; more than half of all must agree too.

    Wide bounds let one answer agree with two that differ from each other. Two sets of the largest size are therefore no
    majority.
    """
    for size in range(num_answers, max(least - 1, num_answers // 2), -1):
        found = [
            chosen for chosen in combinations(range(num_answers), size) if set(combinations(chosen, 2)) <= set(agreeing)
        ]
        if found:
            return frozenset(found[0]) if len(found) == 1 else None
    return None
