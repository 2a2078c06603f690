"""The blocks of each stage of a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from swarm_protocol.span import Span


def split(num_blocks: int, num_stages: int) -> list[Span]:
    """Return the blocks of ``num_stages`` stages. Each stage has as many blocks as any other, or one less.

    Raises:
        ValueError: there are more stages than blocks, or none.
    """
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(f"{num_blocks} blocks cannot be split into {num_stages} stages: expected 1 to {num_blocks}")
    borders = [number * num_blocks // num_stages for number in range(num_stages + 1)]
    return [Span(start, end) for start, end in pairwise(borders)]


def all_spans(num_blocks: int, stages: int | Sequence[Span]) -> list[Span]:
    """Return the blocks of all stages, given the number of stages or their spans.

    Raises:
        ValueError: the spans do not cover each block once, in order.
    """
    if isinstance(stages, int):
        return split(num_blocks, stages)
    borders = [0, *(span.end for span in stages)]
    if borders[-1] != num_blocks or [span.start for span in stages] != borders[:-1]:
        named = ", ".join(map(str, stages)) or "none"
        raise ValueError(f"stages have the blocks {named}: expected each of 0:{num_blocks} once, in order")
    return list(stages)
