"""Routing beside closed forms and brute force, with peers that answer one request at a time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from swarm_training.stages.routing.router import Router, RouterBackoff
from swarm_training.stages.routing.speed import BACKWARD, SHARES

KIND = "backward"
START_S = 10.0


def taught(router: Router, runtimes_s: Mapping[str, float]) -> Router:
    """Each peer has answered one request, and announces how fast it is."""
    router.hear({peer: SHARES[KIND] / took_s for peer, took_s in runtimes_s.items()}, 1)
    for peer, took_s in runtimes_s.items():
        router.asked(peer, runtimes_s, KIND, START_S - took_s)
        router.answered(peer, KIND, START_S - took_s, START_S)
    return router


def run(
    router: Router, runtimes_s: Mapping[str, float], requests: int, window: int, start_s: float = START_S
) -> tuple[Counter[str], float]:
    """Requests by peer and when the last was answered; ``window`` are under way at a time."""
    busy_until = dict.fromkeys(runtimes_s, start_s)
    under_way: list[tuple[float, str, float]] = []
    given: Counter[str] = Counter()
    now = start_s
    for _ in range(requests):
        if len(under_way) == window:
            now, peer, asked_s = heapq.heappop(under_way)
            router.answered(peer, KIND, asked_s, now)
        chosen = router.choose(runtimes_s, KIND, now)
        assert chosen is not None
        router.asked(chosen, runtimes_s, KIND, now)
        busy_until[chosen] = max(now, busy_until[chosen]) + runtimes_s[chosen]
        heapq.heappush(under_way, (busy_until[chosen], chosen, now))
        given[chosen] += 1
    for end_s, peer, asked_s in sorted(under_way):
        router.answered(peer, KIND, asked_s, end_s)
    return given, max(busy_until.values()) - start_s


def test_shares_are_in_proportion_to_speed_when_all_are_busy() -> None:
    runtimes_s = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 0.5}
    given, end_s = run(taught(Router(random.Random(0).random), runtimes_s), runtimes_s, 800, window=32)
    speed = sum(1 / each for each in runtimes_s.values())
    for peer, runtime_s in runtimes_s.items():
        assert abs(given[peer] - 800 / runtime_s / speed) <= 4, given
    assert end_s == pytest.approx(800 / speed, rel=0.01)


def test_a_batch_known_from_the_start_ends_as_early_as_any_assignment_would_have_it() -> None:
    rng = random.Random(1)
    for _ in range(20):
        runtimes_s = {peer: rng.uniform(0.5, 4.0) for peer in "abc"}
        _, end_s = run(taught(Router(rng.random), runtimes_s), runtimes_s, 8, window=8)
        best_s = min(
            max(count * runtimes_s[peer] for peer, count in zip("abc", counts, strict=True))
            for counts in itertools.product(range(9), repeat=3)
            if sum(counts) == 8
        )
        assert end_s == pytest.approx(best_s)


def test_trainers_that_know_nothing_of_each_other_do_not_all_ask_the_same_peer() -> None:
    """64 of them, a request each, at the same time; the time that all take is compared with the least possible."""
    speeds = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 1.0}
    given = Counter[str]()
    for seed in range(64):
        router = Router(random.Random(seed).random)
        router.hear(speeds, 64)
        given.update(router.choose(speeds, KIND, 0.0) or "")
    assert max(given[peer] / speeds[peer] for peer in speeds) < 1.5 * 64 / sum(speeds.values())
    alone = Router(random.Random(0).random)
    alone.hear(speeds, 1)
    assert alone.choose(speeds, KIND, 0.0) == "a"


def test_who_has_computed_a_part_already_is_asked_unless_it_has_a_micro_batch_more_to_do() -> None:
    router = Router(random.Random(0).random)
    router.hear({"a": 1.0, "b": 1.0}, 1)
    assert [router.choose("ab", BACKWARD, 0.0, kept_by) for kept_by in ("a", "b", "gone")] == ["a", "b", "a"]
    router.asked("b", "ab", BACKWARD, 0.0)
    assert router.choose("ab", BACKWARD, 0.0) == "a"
    assert router.choose("ab", BACKWARD, 0.0, "b") == "b"
    router.asked("b", "ab", BACKWARD, 0.0)
    assert router.choose("ab", BACKWARD, 0.0, "b") == "a"
    router.failed("b", BACKWARD, 0.0)
    assert router.choose("ab", BACKWARD, 0.1, "b") == "a"


def test_a_peer_that_does_not_answer_is_given_no_more_and_more() -> None:
    router = Router(random.Random(0).random)
    router.hear({"a": 1.0, "b": 1.0}, 1)
    now, given = 0.0, Counter[str]()
    for _ in range(50):  # a never answers, b does before the next request
        chosen = router.choose("ab", KIND, now)
        assert chosen is not None
        router.asked(chosen, "ab", KIND, now)
        now += 1.0
        given[chosen] += 1
        if chosen == "b":
            router.answered("b", KIND, now - 1.0, now)
    assert given["a"] <= 1


def test_before_anybody_has_announced_a_speed_all_are_equal_and_soon_after_the_newest_speed_counts() -> None:
    router = Router(random.Random(0).random)
    runtimes_s = {"a": 0.001, "b": 0.002}
    given, end_s = run(router, runtimes_s, 40, window=4)
    assert given == Counter(a=20, b=20)
    router.hear({"a": 750.0, "b": 375.0, "new": 375.0}, 1)
    later, _ = run(router, {**runtimes_s, "new": 0.002}, 400, 6, START_S + end_s + 1.0)
    assert abs(later["a"] - 200) < 20 and abs(later["new"] - 100) < 20


def test_the_fastest_gets_all_when_there_is_little_to_do() -> None:
    runtimes_s = {"slow": 3.0, "fast": 1.0}
    given, _ = run(taught(Router(random.Random(3).random), runtimes_s), runtimes_s, 20, window=1)
    assert given == Counter(fast=20)


def test_who_fails_is_left_alone_for_longer_each_time_and_an_answer_ends_that() -> None:
    router = Router(random.Random(5).random, RouterBackoff(first_s=1.0, most_s=3.0, busy_s=0.25))
    now = 0.0
    for expected_s in (1.0, 2.0, 3.0, 3.0):
        assert router.choose(["a"], KIND, now) == "a"
        router.asked("a", ["a"], KIND, now)
        router.failed("a", KIND, now)
        assert router.choose(["a"], KIND, now) is None
        assert router.choose(["a", "b"], KIND, now) == "b"
        assert router.wait_s(["a"], now) == pytest.approx(expected_s)
        assert router.wait_s(["a", "b"], now) == 0.0
        now += expected_s
    router.asked("a", ["a"], KIND, now)
    router.answered("a", KIND, now, now + 0.1)
    router.asked("a", ["a"], KIND, now)
    router.busy("a", KIND, now)
    assert router.wait_s(["a"], now) == pytest.approx(0.25)
    router.asked("a", ["a"], KIND, now)
    router.failed("a", KIND, now)
    assert router.wait_s(["a"], now) == pytest.approx(1.0)


def test_kinds_are_measured_apart_and_waiting_is_not_measured() -> None:
    router = Router(random.Random(6).random)
    for _ in range(3):  # all asked at once, answered one after the other
        router.asked("a", ["a"], "forward", 0.0)
    for number in range(3):
        router.answered("a", "forward", 0.0, 1.0 + number)
    assert router.runtime_s("a", ["a"], "forward") == pytest.approx(1.0)
    router.asked("a", ["a"], "backward", 3.0)
    router.answered("a", "backward", 3.0, 6.0)
    assert router.runtime_s("a", ["a"], "backward") == pytest.approx(3.0)
    assert router.runtime_s("b", ["a", "b"], "forward") == pytest.approx(1.0)


def test_what_is_withdrawn_no_longer_counts_and_those_who_left_are_forgotten() -> None:
    router = Router(random.Random(7).random)
    router.asked("a", ["a"], KIND, 0.0)
    assert router.choose(["a", "b"], KIND, 0.0) == "b"
    router.keep(["b"])
    assert router._peer("a").waiting.total() == 1
    router.withdrawn("a", KIND, 1.0)
    assert router._peer("a").waiting.total() == 0
    router.asked("a", ["a"], KIND, 0.0)
    router.failed("a", KIND, 1.0)
    router.keep(["b"])
    assert router.wait_s(["a"], 1.0) == 0.0
