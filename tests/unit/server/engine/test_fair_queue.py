"""Who floods the queue waits for itself."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm_server.engine.fair_queue import FairQueue


def drained(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_first_come_first_served_for_one_client() -> None:
    queue: FairQueue[str] = FairQueue()
    for work in "abc":
        queue.add(work, "anna", 5)
    assert drained(queue) == ["a", "b", "c"]


def test_one_that_comes_late_waits_for_one_piece_of_each_other() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.add(f"flood {number}", "attacker", 64)
    assert queue.pop() == "flood 0"
    queue.add("honest 0", "honest", 64)
    queue.add("honest 1", "honest", 64)
    assert [queue.pop() for _ in range(4)] == ["honest 0", "flood 1", "honest 1", "flood 2"]


def test_costs_count_and_not_pieces() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        queue.add("large", "large", 64)
        queue.add("small", "small", 1)
    assert Counter(drained(queue)[:40])["small"] > 35


def test_what_was_not_used_is_not_saved() -> None:
    """Whoever was silent may not have all turns afterwards."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        queue.add("busy", "busy", 1)
    for _ in range(20):
        queue.pop()
    for _ in range(20):
        queue.add("late", "late", 1)
    assert Counter(queue.pop() for _ in range(20)) == {"busy": 10, "late": 10}


def test_work_that_is_removed() -> None:
    queue: FairQueue[object] = FairQueue()
    one, two, three, four = works = [object() for _ in range(4)]
    for work in works:
        queue.add(work, "anna", 1)
    queue.remove(two, four)
    queue.remove(two)  # harmless
    assert (len(queue), list(queue)) == (2, [one, three])
    assert (queue.clear(), len(queue)) == ([one, three], 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=50), st.randoms(use_true_random=False))
def test_clients_who_always_have_work_get_equally_much(others: list[tuple[str, int]], chance: random.Random) -> None:
    """To within the largest pieces of both: the bound of Goyal et al., theorem 1."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    served: Counter[str] = Counter()
    for client, cost in others:
        queue.add(("other", cost), f"other {client}", cost)
    for client in ("anna", "bert"):
        queue.add((client, 1), client, 1)
    for _ in range(200):
        client, cost = queue.pop()
        served[client] += cost
        if client in ("anna", "bert"):
            more = chance.randint(1, 9)
            queue.add((client, more), client, more)
        assert abs(served["anna"] - served["bert"]) <= 18
