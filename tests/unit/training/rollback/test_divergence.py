"""When the losses of a run say that it has diverged, and whose losses count."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_training.core.config import RollbackPolicy, checkpoints_needed
from swarm_training.rollback.divergence import Diverged, LossHistory, agreed_loss, observe

POLICY = RollbackPolicy(margin=0.5, patience=3, window=8, warmup=4)


def run(losses: list[float], policy: RollbackPolicy = POLICY) -> list[Diverged | None]:
    history, found = LossHistory(), []
    for step, loss in enumerate(losses):
        history, verdict = observe(policy, history, step, loss)
        found.append(verdict)
    return found


@pytest.mark.parametrize("loss", [nan, inf, -inf])
def test_a_loss_that_is_not_finite_goes_back_at_once_even_at_the_first_step(loss: float) -> None:
    assert run([loss])[0].first_step == 0
    verdicts = run([2.0, 1.9, loss])
    assert verdicts[:2] == [None, None] and verdicts[2].reason == "the loss of step 2 is not finite"


def test_a_high_loss_must_stay_for_so_many_steps() -> None:
    usual = [2.0, 2.1, 1.9, 2.0, 2.0]
    assert run([*usual, 2.6, 2.6, 2.0, 2.6, 2.6, 2.0]) == [None] * 11
    verdicts = run([*usual, 2.6, 2.7, 2.6])
    assert verdicts[:7] == [None] * 7
    assert verdicts[7] == Diverged(5, "the loss was above its median of 2 by 0.5 from step 5 to 7")
    assert run([*usual, 2.5, 2.5, 2.5, 2.5]) == [None] * 9  # the margin itself is not above it


def test_the_median_follows_the_window() -> None:
    slow_rise = [2.0 + 0.05 * step for step in range(60)]  # in 8 steps less than the margin
    assert run(slow_rise) == [None] * 60
    assert run([2.0] * 8 + [2.6] * 3, RollbackPolicy(0.5, 3, 8, 4))[-1] is not None


@given(st.lists(st.floats(0, 100), max_size=60))
def test_the_first_step_named_is_the_first_of_a_row_that_is_too_high(losses: list[float]) -> None:
    """By the definition, computed anew at every step."""
    usual: list[float] = []
    row: list[int] = []
    for step, verdict in enumerate(run(losses)):
        ordered = sorted(usual[-8:])
        middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2 if ordered else inf
        if len(usual[-8:]) >= 4 and losses[step] > middle + 0.5:
            row.append(step)
        else:
            usual.append(losses[step])
            row = []
        assert (verdict is not None) == (len(row) >= 3)
        if verdict is not None:
            assert verdict.first_step == row[0]


def test_the_checkpoint_that_had_the_wrong_loss_is_not_gone_back_to() -> None:
    assert Diverged(250, "").wanted_step == 249 and Diverged(0, "").wanted_step == 0


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 300))
def test_so_many_checkpoints_reach_back_far_enough(every: int, patience: int, step: int) -> None:
    """By counting them: at ``step``, the loss has been too high for ``patience`` steps."""
    policy = RollbackPolicy(patience=patience)
    kept = [each for each in range(step + 1) if each % every == 0][-checkpoints_needed(every, policy) :]
    assert any(each <= Diverged(step - patience + 1, "").wanted_step for each in kept) or step < patience


@given(st.lists(st.none() | st.floats(0, 10) | st.just(inf), min_size=1, max_size=9))
def test_a_group_has_the_loss_that_more_than_half_of_it_reach(losses: list[float | None]) -> None:
    known = [loss for loss in losses if loss is not None]
    reached = [x for x in known if 2 * sum(loss >= x for loss in known) > len(losses)]
    assert agreed_loss(losses) == max(reached, default=None)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="patience is 0: expected 1 to"):
        RollbackPolicy(patience=0)
    with pytest.raises(ValueError, match="warmup is 9: expected at most the window, which is 8"):
        RollbackPolicy(window=8, warmup=9)
    with pytest.raises(ValueError, match="margin is nan: expected a number above 0"):
        RollbackPolicy(margin=nan)
