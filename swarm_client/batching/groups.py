"""The pure policy for how many messages carry the rows that are ready."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

R = TypeVar("R")


def groups_of(ready: Sequence[R], num_rows: int, num_hops: int) -> list[Sequence[R]]:
    """Return the ready rows, out of ``num_rows``, in groups whose sizes differ by one at most. No group is empty.

    While one hop computes a group, other hops compute other groups. Therefore all ``num_rows`` rows would make as many
    groups as there are hops.
    """
    if not ready:
        return []
    num_groups = min(len(ready), max(1, round(len(ready) * num_hops / num_rows)))
    cuts = [len(ready) * number // num_groups for number in range(num_groups + 1)]
    return [ready[start:end] for start, end in itertools.pairwise(cuts)]
