"""The layout of a vector: a span for each owner, which is cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Chunk:
    """The elements ``start:stop`` of a vector, which the member with the number ``owner`` adds up."""

    start: int
    stop: int
    owner: int


def cut(length: int, shares: Sequence[float], chunk_elements: int) -> tuple[Chunk, ...]:
    """Return chunks of at most ``chunk_elements``. Member j owns a span in proportion to its share. Raise ValueError if
    no member has a share."""
    # Not ``sum``, which rounds in another way from Python 3.12 on: all members must cut a vector alike.
    sums = list(accumulate(shares))
    if not sums or not sums[-1] > 0:
        raise ValueError("nobody has a share of the work: expected at least one member with a share above 0")
    chunks, start = [], 0
    for owner, done in enumerate(sums):
        stop = round(length * (done / sums[-1]))
        chunks += [Chunk(at, min(at + chunk_elements, stop), owner) for at in range(start, stop, chunk_elements)]
        start = stop
    return tuple(chunks)
