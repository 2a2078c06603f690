"""Who floods the queue waits for itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_server.queueing.fair_queue import FairQueue


def drained(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_all_work_is_taken_at_once_if_it_fits_and_has_come_to_an_empty_queue() -> None:
    queue: FairQueue[str] = FairQueue()

    def add(*works: str) -> None:
        for work in works:
            queue.add(work, [work], 1)

    add("a", "b", "c")
    assert queue.take_all(lambda works: len(works) < 3) == [] and len(queue) == 3
    assert queue.take_all(lambda works: len(works) == 3) == ["a", "b", "c"] and len(queue) == 0
    assert queue.take_all(lambda _works: True) == []
    add("a", "b", "c")
    assert queue.pop() == "a"
    add("d")
    assert queue.take_all(lambda _works: True) == [] and drained(queue) == ["b", "c", "d"]


def test_pieces_that_come_together_stay_together_if_all_work_is_taken() -> None:
    queue: FairQueue[str] = FairQueue()

    def add_two() -> None:
        queue.add_together("ab", 2, lambda: [("a", ["anna"], 1, ()), ("b", ["bert"], 1, ())])
        queue.add("c", ["anna"], 1)

    add_two()
    assert len(queue) == 3 and queue.take_all(lambda works: works == ["ab", "c"]) == ["ab", "c"] and len(queue) == 0
    add_two()
    assert queue.take_all(lambda _works: False) == [] and drained(queue) == ["a", "b", "c"]
    add_two()
    assert queue.pop() == "a"
    add_two()
    assert queue.take_all(lambda _works: True) == [] and len(queue) == 5
    queue.remove("b")
    assert queue.clear() == ["c", "a", "c"]


def test_users_share_what_their_client_gets() -> None:
    queue: FairQueue[str] = FairQueue(num_levels=2)
    for number in range(90):
        queue.add("anna", ["anna", f"user {number}"], 5)
        queue.add(f"bert's {'xyz'[number % 3]}", ["bert", "xyz"[number % 3]], 5)
    for number in range(90, 120):
        queue.add("anna", ["anna", f"user {number}"], 5)
        queue.pop()
    served = Counter(queue.pop() for _ in range(120))
    assert served == {"anna": 60, "bert's x": 20, "bert's y": 20, "bert's z": 20}


def test_nothing_is_kept_of_names_that_have_nothing() -> None:
    queue: FairQueue[str] = FairQueue(num_levels=2)
    for number in range(1000):
        queue.add("new", [f"client {number % 7}", f"user {number}"], 5)
        if number:
            queue.pop()
    assert sum(len(share.waiting._shares) for share in queue._shares.values()) < 20


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=50), st.randoms(use_true_random=False))
def test_clients_who_always_have_work_get_equally_much(others: list[tuple[str, int]], chance: random.Random) -> None:
    """To within the largest pieces of both: the bound of Goyal et al., theorem 1."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    served: Counter[str] = Counter()
    for client, cost in others:
        queue.add(("other", cost), [f"other {client}"], cost)
    for client in ("anna", "bert"):
        queue.add((client, 1), [client], 1)
    for _ in range(200):
        client, cost = queue.pop()
        served[client] += cost
        if client in ("anna", "bert"):
            more = chance.randint(1, 9)
            queue.add((client, more), [client], more)
        assert abs(served["anna"] - served["bert"]) <= 18


class PlainScan:
    """Start-time fair queueing by a look at every name, whose answers the queue's must be."""

    def __init__(self) -> None:
        self.now, self.turn = 0.0, 0
        self.starts: dict[str, float] = {}
        self.turns: dict[str, int] = {}
        self.waiting: dict[str, list[tuple[tuple[int], int, int]]] = {}  # place, work and cost by name

    def add(self, work: int, name: str, cost: int, place: tuple[int]) -> None:
        if not self.waiting.get(name):
            self.restart(name, max(self.now, self.starts.get(name, 0.0)))
        self.waiting.setdefault(name, []).append((place, work, cost))

    def pop(self, fits: Callable[[int], bool]) -> int | None:
        names = sorted((name for name in self.waiting if self.waiting[name]), key=self.order)
        for name in names:
            for entry in sorted(self.waiting[name]):
                if fits(entry[1]):
                    self.now = self.starts[names[0]]
                    self.waiting[name].remove(entry)
                    self.restart(name, self.starts[name] + entry[2])
                    self.forget_if_empty()
                    return entry[1]
        return None

    def remove(self, work: int) -> None:
        for name, entries in self.waiting.items():
            self.waiting[name] = [entry for entry in entries if entry[1] != work]
        self.forget_if_empty()

    def order(self, name: str) -> tuple[float, int]:
        return self.starts[name], self.turns[name]

    def restart(self, name: str, start: float) -> None:
        self.starts[name], self.turns[name], self.turn = start, self.turn, self.turn + 1

    def forget_if_empty(self) -> None:
        if not any(self.waiting.values()):
            self.starts.clear()
            self.now = 0.0


@pytest.mark.parametrize("seed", range(8))
def test_a_look_at_every_name_gives_the_same_order(seed: int) -> None:
    chance = random.Random(seed)
    num_names = chance.choice([2, 3, 13])
    queue: FairQueue[int] = FairQueue()
    scan = PlainScan()
    works = list(range(500))  # one is removed by its identity
    for work in works:
        call = chance.choices(["add", "pop", "pop even", "remove", "take all"], [10, 7, 1, 1, 0.2])[0]
        if call == "add":
            name, cost, place = str(chance.randrange(num_names)), chance.randint(1, 9), (chance.randrange(3),)
            queue.add(work, [name], cost, place)
            scan.add(work, name, cost, place)
        elif call == "remove":
            gone = works[max(0, work - chance.randrange(20))]
            queue.remove(gone)
            scan.remove(gone)
        elif call == "take all":
            taken = queue.take_all(lambda _works: True)
            assert sorted(scan.pop(lambda work: True) for _ in taken) == taken
        else:
            fits = (lambda work: work % 2 == 0) if call == "pop even" else (lambda work: True)
            assert queue.pop(fits) == scan.pop(fits)
        assert len(queue) == sum(map(len, scan.waiting.values()))
    assert queue.clear() == [scan.pop(lambda work: True) for _ in range(sum(map(len, scan.waiting.values())))]
