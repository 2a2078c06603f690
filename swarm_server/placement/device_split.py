"""The split of a server's span over its devices, as a pure function."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_protocol.span import Span


def split_span(span: Span, block_bytes: Sequence[int], free_bytes: Sequence[int]) -> list[Span]:
    """Return consecutive parts of ``span``, one for each device, in proportion to the devices' free memory.

    Args:
        block_bytes: [blocks of the span], in any unit, because only the proportions count.
        free_bytes: [devices]

    Raises:
        ValueError: there are more devices than blocks.
    """
    num_devices = len(free_bytes)
    if num_devices > len(span):
        raise ValueError(
            f"blocks {span} cannot be split over {num_devices} devices: expected at least one block for each"
        )
    sums = [0]
    for size in block_bytes:
        sums.append(sums[-1] + size)
    parts, start, free_so_far = [], 0, 0
    for number, free in enumerate(free_bytes, start=1):
        free_so_far += free
        last = len(span) - (num_devices - number)  # each device after this one gets a block
        wanted = sums[-1] * free_so_far / max(1, sum(free_bytes))
        end = last if number == num_devices else min(range(start + 1, last + 1), key=lambda i: abs(sums[i] - wanted))
        parts.append(Span(span.start + start, span.start + end))
        start = end
    return parts
