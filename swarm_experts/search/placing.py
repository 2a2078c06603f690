"""Which cells of the grid a server takes, and which it gives up."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from swarm_experts.core.cells import Cell, num_cells, numbered


def candidates(grid: Sequence[int], salt: str) -> Iterator[Cell]:
    """All cells, from a place and in strides that depend on ``salt``, so that servers begin in different places."""
    size = num_cells(grid)
    digest = hashlib.sha256(salt.encode()).digest()
    start, stride = int.from_bytes(digest[:8], "big") % size, int.from_bytes(digest[8:16], "big") % size
    while not _is_coprime(stride, size):
        stride += 1
    return (numbered((start + number * stride) % size, grid) for number in range(size))


def clashes(own: Iterable[Cell], others: Mapping[Cell, Collection[str]], peer_id: str) -> set[Cell]:
    """The cells that a peer gives up: another has them too, whose id is lower. Clients take that one."""
    return {cell for cell in own if any(other < peer_id for other in others.get(cell, ()))}


def by_prefix(cells: Iterable[Cell]) -> dict[Cell, set[int]]:
    """The prefixes under which cells are announced, and the coordinates that follow each.

    In a grid of one dimension that is the empty prefix; in others the empty one is left out: clients go through the
    first coordinates, of which there are few, so that not all servers have to stand under one key.
    """
    following: dict[Cell, set[int]] = {}
    for cell in cells:
        for length in range(min(1, len(cell) - 1), len(cell)):
            following.setdefault(cell[:length], set()).add(cell[length])
    return following


def _is_coprime(first: int, second: int) -> bool:
    while second:
        first, second = second, first % second
    return first == 1
