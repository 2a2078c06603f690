"""A majority is a largest set of answers that all agree."""

from __future__ import annotations

import pytest

from swarm_client.verification.votes import majority


@pytest.mark.parametrize(
    ("num_answers", "agreeing", "least", "found"),
    [
        (2, [], 2, None),
        (3, [(0, 1)], 2, {0, 1}),
        (3, [(0, 1)], 3, None),
        (3, [(0, 2), (1, 2)], 2, None),  # one agrees with both of two that differ
        (4, [(0, 1), (2, 3)], 2, None),
        (4, [(1, 2), (1, 3), (2, 3)], 3, {1, 2, 3}),
        (5, [(0, 1), (2, 3), (2, 4), (3, 4)], 3, {2, 3, 4}),
        (5, [(0, 1)], 2, None),  # no more than half
        (5, [(0, 1), (0, 2), (1, 2), (2, 3), (2, 4), (3, 4)], 3, None),
    ],
)
def test_majority(num_answers: int, agreeing: list, least: int, found: set | None) -> None:
    assert majority(num_answers, agreeing, least) == found
