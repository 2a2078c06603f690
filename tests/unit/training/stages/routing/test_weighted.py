"""Shares of requests beside speeds: always, with newcomers, with those who were away; and what a speed is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from swarm_training.stages.routing.speed import BACKWARD, FORWARD, SHARES, ComputeSpeed, believed
from swarm_training.stages.routing.weighted import WeightedRoundRobin


def given(
    routing: WeightedRoundRobin, willing: str, speeds: Mapping[str, float], requests: int, rng: random.Random
) -> Counter[str]:
    """Work by peer, in micro-batches; half of the requests are forward passes."""
    work: Counter[str] = Counter()
    for _ in range(requests):
        share = SHARES[rng.choice((FORWARD, BACKWARD))]
        peer = routing.choose(willing, speeds, share)
        routing.asked(peer, speeds[peer], share)
        work[peer] += share  # type: ignore[assignment]  # a float counts as well
    return work


@pytest.mark.parametrize("seed", range(20))
def test_at_every_moment_nobody_is_a_micro_batch_away_from_its_share(seed: int) -> None:
    """Which does not depend on how many requests there are, so trainers who know nothing of each other share well."""
    rng = random.Random(seed)
    speeds = {peer: rng.lognormvariate(0, 1) for peer in "abcdefg"[: rng.randint(1, 7)]}
    routing, work, total = WeightedRoundRobin(rng.random), Counter[str](), sum(speeds.values())
    for _ in range(300):
        work += given(routing, "".join(speeds), speeds, 1, rng)
        for peer, speed in speeds.items():
            assert abs(work[peer] - work.total() * speed / total) <= 1 + speed / total * len(speeds)


@pytest.mark.parametrize("seed", range(10))
def test_a_newcomer_and_one_who_was_away_have_their_share_from_then_on(seed: int) -> None:
    rng = random.Random(seed)
    speeds = {"a": 1.0, "b": 2.0, "c": 1.0}
    routing = WeightedRoundRobin(rng.random)
    given(routing, "ab", {"a": 1.0, "b": 2.0}, 500, rng)
    for willing, expected in (("abc", {"a": 25, "b": 50, "c": 25}), ("ab", {"a": 33, "b": 67})):
        work = given(routing, willing, speeds, 200, rng)
        for peer, share in expected.items():
            assert abs(work[peer] - work.total() * share / 100) <= 2.5
    back = given(routing, "abc", speeds, 200, rng)  # what it has missed is not made up for
    assert abs(back["c"] - back.total() / 4) <= 2.5


def test_trainers_begin_at_different_peers() -> None:
    speeds = dict.fromkeys("abcd", 1.0)
    first = Counter(
        WeightedRoundRobin(random.Random(seed).random).choose("abcd", speeds, SHARES[BACKWARD]) for seed in range(200)
    )
    assert all(30 < first[peer] < 70 for peer in "abcd")


def test_a_speed_is_what_could_be_computed_and_not_what_was_asked_for() -> None:
    speed = ComputeSpeed()
    assert speed.per_s == 0
    for _ in range(50):  # 4 s a micro-batch, whenever they come
        speed.note(SHARES[FORWARD], 1.0)
        speed.note(SHARES[BACKWARD], 3.0)
    assert speed.per_s == pytest.approx(0.25)
    for _ in range(50):  # the machine has something else to do as well
        speed.note(SHARES[BACKWARD], 6.0)
    assert speed.per_s == pytest.approx(0.125, rel=0.01)
    assert sum(SHARES.values()) == 1


def test_announcements_are_believed_within_reason() -> None:
    assert believed({}, ["a", "b"]) == {"a": 1.0, "b": 1.0}
    assert believed({"a": 2.0, "b": 0.0, "c": 8.0, "d": 4.0, "gone": 1.0}, "abcd") == {"a": 2, "b": 4, "c": 8, "d": 4}
    assert believed({"a": 1e300, "b": 1.0, "c": 1e-320}, "abc") == {"a": 100.0, "b": 1.0, "c": 0.01}
