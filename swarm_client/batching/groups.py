"""In how many messages to send the rows that are ready. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

R = TypeVar("R")


def groups_of(ready: Sequence[R], num_rows: int, num_hops: int) -> list[Sequence[R]]:
    """The rows that are ready, of ``num_rows``, cut into groups that differ by one row at most; none is empty.

    While a hop computes one group, the hops before and behind it compute others: all rows together make as many groups
    as there are hops.
    """
    if not ready:
        return []
    num_groups = min(len(ready), max(1, round(len(ready) * num_hops / num_rows)))
    cuts = [len(ready) * number // num_groups for number in range(num_groups + 1)]
    return [ready[start:end] for start, end in itertools.pairwise(cuts)]
