"""A follower is left out if the group would be faster without it for long, and not for a short delay."""

from __future__ import annotations

from math import inf

import pytest

from swarm_server.placement.slow_follower import BUSY_S, MANY_WINDOWS, SlowWindows, slowdown

HALVES, THIRDS = (0.5, 0.5), (0.5, 0.25, 0.25)
WELL, SLOW, BETWEEN = (2.0, 0.1), (1.0, 3.0), (1.0, 1.4)


def after(*windows: tuple[float, ...]) -> SlowWindows:
    state = SlowWindows.none(len(windows[0]))
    for times_s in windows:
        state = state.after(HALVES if len(times_s) == 2 else THIRDS, times_s)
    return state


def test_the_time_beside_that_without_a_follower() -> None:
    assert slowdown(HALVES, (1.0, 0.0), 1) == 0.5  # alone the leader would compute twice as many rows
    assert slowdown(HALVES, (1.0, 3.0), 1) == 2.0
    assert slowdown(HALVES, (0.0, 3.0), 1) == inf
    # Without the last follower, the leader has two thirds of the rows, and waits for the other as before.
    assert slowdown(THIRDS, (1.0, 1.0, 2.0), 2) == pytest.approx(4 / (4 / 3 + 1))


def test_a_follower_that_is_slow_for_long_is_left_out() -> None:
    assert after(*[SLOW] * (MANY_WINDOWS - 1)).slow_follower is None
    assert after(*[SLOW] * MANY_WINDOWS).slow_follower == 1
    assert after(*[(1.0, 0.0, 4.0)] * MANY_WINDOWS).slow_follower == 2
    assert after(*[WELL] * 2 * MANY_WINDOWS).slow_follower is None


def test_a_good_window_begins_again_and_those_between_say_nothing() -> None:
    almost = [SLOW] * (MANY_WINDOWS - 1)
    assert after(*almost, WELL, SLOW).slow_follower is None
    assert after(*almost, BETWEEN, BETWEEN).slow_follower is None
    assert after(*almost, BETWEEN, SLOW).slow_follower == 1
    idle = (BUSY_S / 100, BUSY_S / 2)
    assert after(*almost, idle).slow_follower is None
    assert after(*almost, *[idle] * MANY_WINDOWS, SLOW).slow_follower == 1
