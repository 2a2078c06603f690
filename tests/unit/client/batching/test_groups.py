"""Rows that are ready are sent in as many messages as keep all hops busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.batching.groups import groups_of


def sizes(num_ready: int, num_rows: int, num_hops: int) -> list[int]:
    return [len(group) for group in groups_of(range(num_ready), num_rows, num_hops)]


@pytest.mark.parametrize(
    ("num_ready", "num_rows", "num_hops", "expected"),
    [
        (16, 16, 1, [16]),  # all rows: a group for each hop
        (7, 7, 3, [2, 2, 3]),
        (9, 16, 2, [9]),  # some rows stay together unless they are more than one group
        (15, 16, 2, [7, 8]),
        (2, 2, 5, [1, 1]),
        (0, 0, 0, []),
    ],
)
def test_rows_make_groups_for_each_hop(num_ready: int, num_rows: int, num_hops: int, expected: list[int]) -> None:
    assert sizes(num_ready, num_rows, num_hops) == expected


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 9))
def test_each_row_is_in_one_group_and_groups_are_of_one_size(num_ready: int, num_others: int, num_hops: int) -> None:
    groups = groups_of(range(num_ready), num_ready + num_others, num_hops)
    assert [row for group in groups for row in group] == list(range(num_ready))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1 and all(groups)
