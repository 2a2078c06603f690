"""How many blocks fit into the memory that there is."""

from __future__ import annotations

import pytest

from swarm_server.machine.memory import num_that_fit


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
