"""Blocks are split over devices in proportion to their memory; every device has some."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.span import Span
from swarm_server.placement.device_split import split_span


@pytest.mark.parametrize(
    ("sizes", "free", "expected"),
    [
        ([1] * 8, [10, 10], [4, 4]),
        ([1] * 8, [30, 10], [6, 2]),
        ([1] * 8, [10, 30, 40], [1, 3, 4]),
        ([1] * 3, [1000, 1, 1], [1, 1, 1]),
        ([1] * 4, [1, 1000], [1, 3]),
        ([3, 1, 1, 1], [10, 10], [1, 3]),  # the first is as large as the others together
        ([1] * 4, [0, 0], [1, 3]),
        ([1] * 5, [7], [5]),
    ],
)
def test_in_proportion_to_free_memory(sizes: list[int], free: list[int], expected: list[int]) -> None:
    assert list(map(len, split_span(Span(10, 10 + len(sizes)), sizes, free))) == expected


@given(st.data())
def test_no_device_is_much_fuller_than_it_must_be(data: st.DataObject) -> None:
    """Beside the best of all splits: what a cut misses is at most half a block at each of its ends."""
    num_blocks = data.draw(st.integers(1, 7))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=num_blocks, max_size=num_blocks))
    free = data.draw(st.lists(st.integers(100, 900), min_size=1, max_size=min(3, num_blocks)))
    span = Span(3, 3 + num_blocks)
    parts = split_span(span, sizes, free)
    assert [parts[0].start, parts[-1].end, len(parts)] == [span.start, span.end, len(free)]
    assert all(part.end == after.start for part, after in pairwise(parts))

    def filled(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, num_blocks]
        return max(sum(sizes[a:b]) / room for (a, b), room in zip(pairwise(bounds), free, strict=True))

    best = min(map(filled, combinations(range(1, num_blocks), len(free) - 1)))
    found = filled(tuple(part.start - span.start for part in parts[1:]))
    assert found <= best + len(free) * max(sizes) / min(free)


def test_more_devices_than_blocks() -> None:
    with pytest.raises(ValueError, match="blocks 4:6 cannot be split over 3 devices: expected at least one block"):
        split_span(Span(4, 6), [1, 1], [1, 1, 1])
