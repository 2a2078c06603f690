"""Every micro-batch is one trainer's, and all others' in need."""

from __future__ import annotations

import pytest

from swarm_training.stages.routing.turns import Turn, next_ones, turn_of, window


def test_each_micro_batch_belongs_to_one_of_those_who_take_part() -> None:
    trainers = {"b": 0, "a": 3, "c": 9}
    assert turn_of("b", trainers, 2) == Turn(0, 1)
    assert [turn_of(who, trainers, 5) for who in "abc"] == [Turn(0, 2), Turn(1, 2), None]
    assert turn_of("d", trainers, 5) is None
    turns = [Turn(rank, 3) for rank in range(3)]
    for number in range(20):
        assert sum(turn.has(number) for turn in turns) == 1


def test_newcomers_wait_for_their_step_only_while_others_take_part() -> None:
    newcomers = {"a": 7, "b": 7, "c": 8}
    assert [turn_of(who, {**newcomers, "d": 5}, 5) for who in "abcd"] == [None, None, None, Turn(0, 1)]
    assert [turn_of(who, newcomers, 5) for who in "abc"] == [Turn(0, 2), Turn(1, 2), None]
    assert turn_of("a", {}, 5) is None


def test_own_ones_come_first_and_those_of_others_only_when_nothing_happens() -> None:
    lacking, under_way = range(6), {1}
    assert next_ones(lacking, under_way, Turn(1, 2), is_stalled=False) == [3, 5]
    assert next_ones(lacking, under_way, Turn(0, 2), is_stalled=True) == [0, 2, 4, 3, 5]
    assert next_ones(lacking, set(), None, is_stalled=False) == []
    assert next_ones(lacking, set(), None, is_stalled=True) == [0, 1, 2, 3, 4, 5]
    assert next_ones(range(9), set(), Turn(1, 3), is_stalled=True) == [1, 4, 7, 3, 5, 6, 8, 0, 2]


@pytest.mark.parametrize(("peers", "trainers", "expected"), [(8, 1, 16), (8, 3, 6), (1, 9, 1), (0, 1, 1), (999, 1, 64)])
def test_as_many_are_under_way_as_the_swarm_takes(peers: int, trainers: int, expected: int) -> None:
    assert window(peers, trainers, per_peer=2.0, most=64) == expected
