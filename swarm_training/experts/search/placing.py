"""The choice of the grid cells that a server takes, and of those that it gives up."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import gcd

from swarm_training.experts.core.cells import Cell, num_cells, numbered


def candidates(grid: Sequence[int], salt: str) -> Iterator[Cell]:
    """Yield all cells, with a start and a stride that depend on ``salt``, so that servers begin in different places."""
    size = num_cells(grid)
    digest = hashlib.sha256(salt.encode()).digest()
    start, stride = int.from_bytes(digest[:8], "big") % size, int.from_bytes(digest[8:16], "big") % size
    while gcd(stride, size) != 1:
        stride += 1
    return (numbered((start + number * stride) % size, grid) for number in range(size))


def clashes(own: Iterable[Cell], others: Mapping[Cell, Collection[str]], peer_id: str) -> set[Cell]:
    """Return the cells that a peer gives up: another peer with a lower id has them too, and clients call that peer."""
    return {cell for cell in own if any(other < peer_id for other in others.get(cell, ()))}


def by_prefix(cells: Iterable[Cell]) -> dict[Cell, set[int]]:
    """Return the prefixes under which cells are announced, and the coordinates that follow each.

    A grid of one dimension uses the empty prefix. Grids of more dimensions leave it out, so that not all servers store
    a record under one key. Clients try the first coordinates instead, which are few.
    """
    following: dict[Cell, set[int]] = {}
    for cell in cells:
        for length in range(min(1, len(cell) - 1), len(cell)):
            following.setdefault(cell[:length], set()).add(cell[length])
    return following
