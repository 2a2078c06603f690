"""How many blocks fit into the memory that there is."""

from __future__ import annotations

import pytest

from swarm_server.machine.memory import num_that_fit, tokens_with_scores


@pytest.mark.parametrize(
    ("sizes", "free", "expected"),
    [
        ([10] * 8, 35.0, 3),
        ([10] * 8, 80.0, 8),
        ([10] * 8, 9.9, 0),
        ([14, 10, 10, 10, 10, 14], 34.0, 3),  # 14 + 10 + 10 at worst, not three times the largest
        ([14, 10, 10, 10, 10, 14], 33.0, 2),
        ([14, 10, 10, 10, 10, 14], 68.0, 6),
    ],
)
def test_as_many_as_fit_wherever_they_begin(sizes: list[int], free: float, expected: int) -> None:
    assert num_that_fit(sizes, free) == expected


def test_the_scores_of_an_index_take_a_fifth_of_what_is_free() -> None:
    """Two copies in float32, for each head and each pair of a token and a position."""
    num_tokens = tokens_with_scores(free_bytes=100e9, num_heads=64, num_positions=160_000)
    assert num_tokens * 160_000 * 64 * 8 <= 20e9 < (num_tokens + 1) * 160_000 * 64 * 8
    assert tokens_with_scores(free_bytes=0, num_heads=64, num_positions=160_000) == 1
