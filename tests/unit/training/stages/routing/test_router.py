"""Routing beside closed forms and brute force, with peers that answer one request at a time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from swarm_training.stages.routing.router import (
    POLICIES,
    QUEUE_ONLY,
    RANDOM,
    READY_TIME,
    SHORTEST_DELAY,
    WEIGHTED,
    Router,
    RouterBackoff,
)
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


def run(router: Router, runtimes_s: Mapping[str, float], requests: int, window: int) -> tuple[Counter[str], float]:
    """Requests by peer and when the last was answered; ``window`` are under way at a time."""
    return run_from(router, runtimes_s, requests, window, START_S)


def run_from(
    router: Router, runtimes_s: Mapping[str, float], requests: int, window: int, start_s: float
) -> tuple[Counter[str], float]:
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


@pytest.mark.parametrize("policy", [SHORTEST_DELAY, READY_TIME])
def test_shares_are_in_proportion_to_speed_when_all_are_busy(policy: str) -> None:
    runtimes_s = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 0.5}
    given, end_s = run(taught(Router(policy, random.Random(0).random), runtimes_s), runtimes_s, 800, window=32)
    speed = sum(1 / each for each in runtimes_s.values())
    for peer, runtime_s in runtimes_s.items():
        assert abs(given[peer] - 800 / runtime_s / speed) <= 4, given
    assert end_s == pytest.approx(800 / speed, rel=0.01)


@pytest.mark.parametrize("policy", [SHORTEST_DELAY, READY_TIME])
def test_a_batch_known_from_the_start_ends_as_early_as_any_assignment_would_have_it(policy: str) -> None:
    rng = random.Random(1)
    for _ in range(20):
        runtimes_s = {peer: rng.uniform(0.5, 4.0) for peer in "abc"}
        _, end_s = run(taught(Router(policy, rng.random), runtimes_s), runtimes_s, 8, window=8)
        best_s = min(
            max(count * runtimes_s[peer] for peer, count in zip("abc", counts, strict=True))
            for counts in itertools.product(range(9), repeat=3)
            if sum(counts) == 8
        )
        assert end_s == pytest.approx(best_s)


def test_announced_speeds_give_shares_however_little_there_is_to_do() -> None:
    runtimes_s = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 0.5}
    speed = sum(1 / each for each in runtimes_s.values())
    for window in (1, 3, 32):
        router = Router(WEIGHTED, random.Random(0).random)
        router.hear({peer: 1 / each for peer, each in runtimes_s.items()}, 1)
        given, end_s = run(router, runtimes_s, 800, window)
        for peer, runtime_s in runtimes_s.items():
            assert abs(given[peer] - 800 / runtime_s / speed) <= 2, given
        assert window < 32 or end_s == pytest.approx(800 / speed, rel=0.02)


def test_trainers_that_know_nothing_of_each_other_do_not_all_ask_the_same_peer() -> None:
    """64 of them, a request each, at the same time; the time that all take is compared with the least possible."""
    speeds = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 1.0}
    given = Counter[str]()
    for seed in range(64):
        router = Router(SHORTEST_DELAY, random.Random(seed).random)
        router.hear(speeds, 64)
        given.update(router.choose(speeds, KIND, 0.0) or "")
    assert max(given[peer] / speeds[peer] for peer in speeds) < 1.5 * 64 / sum(speeds.values())
    alone = Router(SHORTEST_DELAY, random.Random(0).random)
    alone.hear(speeds, 1)
    assert alone.choose(speeds, KIND, 0.0) == "a"


def test_who_has_computed_a_part_already_is_asked_unless_it_has_a_micro_batch_more_to_do() -> None:
    router = Router(SHORTEST_DELAY, random.Random(0).random)
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
    router = Router(SHORTEST_DELAY, random.Random(0).random)
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
    router = Router(SHORTEST_DELAY, random.Random(0).random)
    runtimes_s = {"a": 0.001, "b": 0.002}
    given, end_s = run(router, runtimes_s, 40, window=4)
    assert given == Counter(a=20, b=20)
    router.hear({"a": 750.0, "b": 375.0, "new": 375.0}, 1)
    later, _ = run_from(router, {**runtimes_s, "new": 0.002}, 400, 6, START_S + end_s + 1.0)
    assert abs(later["a"] - 200) < 20 and abs(later["new"] - 100) < 20


def test_who_is_left_alone_is_asked_by_no_policy_and_speeds_are_those_of_the_last_announcement() -> None:
    for policy in POLICIES:
        router = Router(policy, random.Random(0).random, RouterBackoff(first_s=1.0))
        router.hear({"a": 50.0, "b": 1.0}, 4)
        router.asked("a", "ab", KIND, 0.0)
        router.failed("a", KIND, 0.0)
        assert {router.choose("ab", KIND, 0.5) for _ in range(20)} == {"b"}, policy
    router = Router(WEIGHTED, random.Random(0).random)
    for announced, least, most in (({"a": 3.0, "b": 1.0}, 28, 32), ({"a": 1.0, "b": 3.0}, 8, 13)):
        router.hear(announced, 1)
        given = Counter[str]()
        for _ in range(40):
            given.update(chosen := router.choose("ab", KIND, 0.0))
            router.asked(chosen, "ab", KIND, 0.0)
            router.answered(chosen, KIND, 0.0, 0.0)
        assert least <= given["a"] <= most


@pytest.mark.parametrize(("window", "most"), [(1, 1.3), (2, 1.3), (12, 1.05)])
def test_it_learns_speeds_and_is_better_than_chance_and_than_queues_alone(window: int, most: float) -> None:
    runtimes_s = {"a": 0.2, "b": 1.0, "c": 4.0}
    end_s = {policy: run(Router(policy, random.Random(2).random), runtimes_s, 400, window)[1] for policy in POLICIES}
    assert end_s[READY_TIME] < most * 400 / sum(1 / each for each in runtimes_s.values())
    assert end_s[READY_TIME] < 0.9 * end_s[QUEUE_ONLY] < end_s[RANDOM]


@pytest.mark.parametrize("policy", [SHORTEST_DELAY, READY_TIME])
def test_the_fastest_gets_all_when_there_is_little_to_do(policy: str) -> None:
    runtimes_s = {"slow": 3.0, "fast": 1.0}
    given, _ = run(taught(Router(policy, random.Random(3).random), runtimes_s), runtimes_s, 20, window=1)
    assert given == Counter(fast=20)


def test_a_peer_that_becomes_slow_is_found_out_and_a_newcomer_is_tried() -> None:
    runtimes_s = {"a": 1.0, "b": 1.0}
    router = taught(Router(READY_TIME, random.Random(4).random), runtimes_s)
    later = {"a": 10.0, "b": 1.0, "new": 1.0}
    given, _ = run(router, later, 210, window=6)
    assert given["a"] < 30 and given["new"] > 70


def test_who_fails_is_left_alone_for_longer_each_time_and_an_answer_ends_that() -> None:
    router = Router(READY_TIME, random.Random(5).random, RouterBackoff(first_s=1.0, most_s=3.0, busy_s=0.25))
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
    router = Router(READY_TIME, random.Random(6).random)
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
    router = Router(QUEUE_ONLY, random.Random(7).random)
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


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        ValueError, match="expected one of shortest_delay, weighted_round_robin, ready_time, queue_only, random"
    ):
        Router("fastest", random.Random(8).random)
