"""The speed of a peer: what it announces, and how much of that is believed."""

from __future__ import annotations

import pytest

from swarm_training.stages.routing.speed import BACKWARD, FORWARD, SHARES, ComputeSpeed, believed


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
