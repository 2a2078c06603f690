"""The layout of a vector: a span for each owner, which is cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """The elements ``start:stop`` of a vector, which the member with the number ``owner`` adds up."""

    start: int
    stop: int
    owner: int


def cut(length: int, shares: Sequence[float], chunk_elements: int) -> tuple[Chunk, ...]:
    """Return chunks of at most ``chunk_elements``. Member j owns a span in proportion to its share. Raise ValueError if
    no member has a share."""
    total = sum(shares)
    if not total > 0:
        raise ValueError("nobody has a share of the work: expected at least one member with a share above 0")
    chunks, start, done = [], 0, 0.0
    for owner, share in enumerate(shares):
        done += share  # in the order of `total`, so that the last quotient is exactly 1
        stop = round(length * (done / total))
        chunks += [Chunk(at, min(at + chunk_elements, stop), owner) for at in range(start, stop, chunk_elements)]
        start = stop
    return tuple(chunks)
