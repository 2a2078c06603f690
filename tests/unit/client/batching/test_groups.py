"""Rows that are ready are sent in as many messages as keep all hops busy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm_client.batching.groups import groups_of


def sizes(num_ready: int, num_rows: int, num_hops: int) -> list[int]:
    return [len(group) for group in groups_of(range(num_ready), num_rows, num_hops)]


def test_all_rows_make_a_group_for_each_hop() -> None:
    assert sizes(16, 16, 1) == [16]
    assert sizes(16, 16, 2) == [8, 8]
    assert sizes(7, 7, 3) == [2, 2, 3]


def test_some_rows_stay_together_unless_they_are_more_than_one_group() -> None:
    assert sizes(8, 16, 2) == [8]
    assert sizes(9, 16, 2) == [9]
    assert sizes(1, 16, 2) == [1]
    assert sizes(15, 16, 2) == [7, 8]


def test_fewer_rows_than_hops_are_groups_of_one() -> None:
    assert sizes(2, 2, 5) == [1, 1]
    assert sizes(0, 0, 0) == []


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 9))
def test_each_row_is_in_one_group_and_groups_are_of_one_size(num_ready: int, num_others: int, num_hops: int) -> None:
    groups = groups_of(range(num_ready), num_ready + num_others, num_hops)
    assert [row for group in groups for row in group] == list(range(num_ready))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1 and all(groups)
