"""Whose turn it is."""

from __future__ import annotations

from swarm_training.experts.search.batching import BatchQueue


def test_requests_of_one_key_wait_for_each_other() -> None:
    queue: BatchQueue[str, int] = BatchQueue(window_s=1.0, max_rows=100)
    assert queue.due_in_s(0.0) is None
    queue.add("a", 1, 10, now=0.0)
    queue.add("b", 2, 10, now=0.2)
    queue.add("a", 3, 10, now=0.9)
    assert queue.due_in_s(0.25) == 0.75
    assert queue.due_in_s(1.0) == 0.0
    assert queue.take() == ("a", [1, 3])
    assert queue.take() == ("b", [2])
    assert queue.due_in_s(2.0) is None


def test_a_full_batch_does_not_wait_and_the_rest_keeps_its_turn() -> None:
    queue: BatchQueue[str, int] = BatchQueue(window_s=1.0, max_rows=4)
    queue.add("b", 0, 1, now=0.0)
    for item in range(3):
        queue.add("a", item, 2, now=0.5)
    assert queue.due_in_s(0.5) == 0.0
    assert queue.take() == ("a", [0, 1])
    assert queue.due_in_s(0.5) == 0.5
    assert queue.take() == ("b", [0])
    assert queue.take() == ("a", [2])


def test_what_is_larger_than_a_batch_is_computed_alone() -> None:
    queue: BatchQueue[str, int] = BatchQueue(window_s=1.0, max_rows=4)
    queue.add("a", 1, 9, now=0.0)
    queue.add("a", 2, 1, now=0.0)
    assert queue.take() == ("a", [1]) and queue.take() == ("a", [2])
