"""What is replayed to servers that take others' places."""

from __future__ import annotations

import pytest

from swarm_client.failover.replay import HopProgress, Replay, Taken, gaps, plan_catching_up, plan_replay

START = 10
FIRST = (1 << 32) + 5
STEPS = [Taken(FIRST, 10, 14, True), Taken(FIRST + 1, 14, 18), Taken(FIRST + 2, 18, 19)]
BEFORE_CALL = HopProgress(FIRST - 1, 12)  # the call begins with a crop


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        ("", []),
        ("...", []),
        ("x..", [range(0, 1)]),
        (".xx.x", [range(4, 5), range(1, 3)]),
        ("xxx", [range(0, 3)]),
    ],
)
def test_runs_of_failed_hops_last_first(failed, expected):
    assert gaps([mark == "x" for mark in failed]) == expected


def test_the_client_replays_everything_with_the_rows_as_they_are_now():
    assert plan_replay(STEPS, START, None, BEFORE_CALL, 0) == Replay(True, (0, 10), tuple(STEPS), FIRST - 1, FIRST + 2)


def test_a_hop_that_has_not_heard_of_the_call_replays_the_rows_as_they_were():
    replay = plan_replay(STEPS, START, BEFORE_CALL, BEFORE_CALL, 0)
    assert replay == Replay(False, (0, 10), (), FIRST - 1, FIRST - 1)


def test_a_hop_in_the_middle_of_the_call_replays_what_it_has():
    before, after = HopProgress(FIRST + 1, 18), HopProgress(FIRST, 14)
    assert plan_replay(STEPS, START, before, after, 0) == Replay(True, (0, 10), tuple(STEPS[:2]), FIRST, FIRST + 1)


def test_a_hop_that_is_new_itself_has_rows_as_they_were_when_it_came():
    """It was given its history after the call had changed the rows, and has not seen the call's first step yet."""
    before = HopProgress(number=3, length=10, changed_number=FIRST + 2)
    assert plan_replay(STEPS, START, before, None, FIRST) == Replay(True, (0, 10), (), FIRST, FIRST + 2)


PAST = [Taken(FIRST - 3, 7, 8), Taken(FIRST - 2, 8, 9), Taken(FIRST - 1, 9, 10)]
PLAIN = [Taken(FIRST, 10, 11)]


@pytest.mark.parametrize(
    ("copy", "history", "resent"),
    [
        (HopProgress(FIRST, 11), (10, 10), 0),
        (HopProgress(FIRST - 1, 10), (10, 10), 1),
        (HopProgress(FIRST - 2, 9), (9, 10), 1),
        (HopProgress(FIRST - 3, 8), (8, 10), 1),
    ],
    ids=["in-the-call", "up-to-date", "one-behind", "two-behind"],
)
def test_a_copy_that_lags_behind_gets_what_it_has_missed(copy, history, resent):
    replay = plan_catching_up(copy, PLAIN, START, PAST, None)
    assert (replay.history, len(replay.resend)) == (history, resent)


def test_a_copy_goes_back_to_where_what_it_has_missed_began():
    past = [Taken(FIRST - 3, 7, 14), Taken(FIRST - 2, 9, 12), Taken(FIRST - 1, 12, 13)]
    replay = plan_catching_up(HopProgress(FIRST - 3, 14), [Taken(FIRST, 11, 12)], 11, past, None)
    assert replay.history == (9, 11)


@pytest.mark.parametrize(
    ("copy", "steps", "past"),
    [
        (HopProgress(FIRST - 4, 7), PLAIN, PAST),
        (HopProgress(FIRST - 2, 9), STEPS, PAST),
        (HopProgress(FIRST - 2, 9), PLAIN, [*PAST[:2], Taken(FIRST - 1, 9, 10, True)]),
        (HopProgress(5, 6), PLAIN, []),
    ],
    ids=["too-old", "rows-change-now", "rows-have-changed", "not-filled-yet"],
)
def test_a_copy_that_is_of_no_use(copy, steps, past):
    assert plan_catching_up(copy, steps, START, past, None) is None
