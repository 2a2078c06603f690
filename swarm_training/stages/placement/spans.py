"""The blocks of each stage of a model."""

from __future__ import annotations

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
