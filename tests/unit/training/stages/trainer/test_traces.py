"""Which backwards a replay needs, beside the stages that it is for; and what is kept for it."""

from __future__ import annotations

from itertools import combinations

import torch

from swarm_training.stages.trainer.micro_batches import Content, Trace, Traces, backwards_needed


def test_a_first_pass_goes_through_all_stages_and_a_replay_through_the_one_that_lacks() -> None:
    assert backwards_needed(frozenset(range(4)), frozenset(), 4) == [3, 2, 1, 0]
    assert backwards_needed(frozenset({1}), frozenset({0, 1, 2}), 4) == [1]
    assert backwards_needed(frozenset({1}), frozenset(), 4) == [3, 2, 1]
    assert backwards_needed(frozenset({0, 2}), frozenset({0}), 4) == [3, 2, 0]


def test_every_backward_has_the_gradient_that_it_needs_and_none_is_for_nothing() -> None:
    stages = range(4)
    sets = [frozenset(each) for size in range(5) for each in combinations(stages, size)]
    for lacking in sets:
        for known in sets:
            needed = backwards_needed(lacking, known, 4)
            have = set(known)
            for stage in needed:
                assert stage == 3 or stage in have
                have.add(stage - 1)
            assert lacking <= set(needed) and needed == sorted(needed, reverse=True)
            for stage in set(needed) - lacking:  # the gradient of its inputs is what the next one lacks
                assert stage - 1 in needed and stage - 1 not in known


def test_the_oldest_are_dropped_when_they_take_too_much() -> None:
    traces, ids = Traces(max_bytes=100), torch.zeros(1, dtype=torch.int64)
    made = [Trace(Content(ids, ids), {1: torch.zeros(10)}) for _ in range(3)]  # 40 bytes each
    for number, trace in enumerate(made):
        traces.keep(number, trace)
    assert traces.get(0) is None and traces.get(1) is made[1] and traces.get(2) is made[2]
    traces.keep(1, made[1])  # used again
    traces.keep(3, made[0])
    assert traces.get(2) is None and traces.get(1) is made[1]
