"""How many guesses there are follows from what was measured."""

from __future__ import annotations

import itertools

import pytest

from swarm_client.speculation.policy import MOST_POSITIONS, PLAIN, DraftPlan, Policy, expected_tokens


def measured(
    acceptance: float, pass_s: float, position_s: float, guess_s: float = 0.0, passes: int = 60, **options
) -> tuple[Policy, DraftPlan]:
    """A policy after so many passes that took what a line of these costs says."""
    policy = Policy(0.5, **options)
    owed = 0.0
    for _ in range(passes):
        size = policy.choose(15)
        owed += expected_tokens(acceptance, size.length) - 1
        right = min(size.length, int(owed))
        owed -= right
        policy.passed(size, pass_s + position_s * size.num_positions, right, guess_s * size.length)
    return policy, policy.choose(15)


def test_expected_tokens_are_a_sum_of_powers():
    for acceptance, length in itertools.product((0.0, 0.3, 0.8, 1.0), (0, 1, 5)):
        assert expected_tokens(acceptance, length) == pytest.approx(sum(acceptance**n for n in range(length + 1)))


def test_nothing_is_guessed_until_a_plain_pass_is_known():
    policy = Policy(0.9)
    assert policy.choose(8) == PLAIN
    policy.passed(PLAIN, 0.2, 0, 0.0)
    assert policy.choose(8) == PLAIN
    policy.passed(PLAIN, 0.2, 0, 0.0)
    assert policy.choose(8).length


@pytest.mark.parametrize(
    ("acceptance", "position_s", "guess_s"), [(0.8, 0.002, 0.002), (0.6, 0.005, 0.005), (0.9, 0.001, 0.001)]
)
def test_length_is_near_the_best_of_the_formula(acceptance, position_s, guess_s):
    _, size = measured(acceptance, 0.2, position_s, guess_s, most_rows=1)

    def rate(length: int) -> float:
        return expected_tokens(acceptance, length) / (0.2 + position_s * (length + 1) + guess_s * length)

    assert rate(size.length) > 0.93 * max(map(rate, range(16)))


def test_farther_servers_are_asked_with_more_guesses():
    near, far = (measured(0.8, pass_s, 0.004, 0.002, most_rows=1)[1].length for pass_s in (0.01, 0.4))
    assert near < far


def test_what_costs_more_than_it_gains_is_not_done():
    assert measured(0.6, 0.0, 0.05)[1] == PLAIN  # positions as dear as passes
    assert measured(0.0, 0.1, 0.01, 0.01)[1].length <= 1  # wrong guesses
    assert measured(0.45, 0.3, 0.0005)[1].num_rows > 1  # a long way, and cheap positions
    assert measured(0.45, 0.3, 0.02)[1].num_rows <= 1


def test_a_pass_is_never_taken_for_a_prompt():
    for acceptance in (0.3, 0.6, 0.9, 1.0):
        _, size = measured(acceptance, 1.0, 0.0)
        assert size.num_positions <= MOST_POSITIONS


def test_fast_passes_are_left_alone_unless_it_was_asked_for():
    assert measured(0.9, 0.01, 0.0001, least_pass_s=0.04)[1] == PLAIN
    assert measured(0.9, 0.01, 0.0001)[1].length > 1


def test_a_guess_that_was_slow_is_tried_again():
    policy, guess_s = Policy(0.7), [2.0]
    for _ in range(100):
        size = policy.choose(15)
        policy.passed(size, 0.2, size.length // 2, guess_s.pop() if size.length and guess_s else 0.004 * size.length)
    assert not guess_s and policy.choose(15).length > 1


def test_guesses_that_stay_slow_are_tried_one_at_a_time():
    policy, sizes = Policy(0.7), []
    for _ in range(300):
        sizes.append(policy.choose(15))
        policy.passed(sizes[-1], 0.2, sizes[-1].length // 2, 1.0 * sizes[-1].length)
    tried = [size.length for size in sizes if size.length]
    assert tried[1:] == [1] * 4


def test_a_stall_is_no_measurement():
    policy, size = measured(0.8, 0.2, 0.002, 0.001, most_rows=1)
    policy.passed(size, 20.0, 0, 0.001)
    assert policy.choose(15).length >= size.length - 2
