"""When the losses of a run say that it has diverged, and whose losses count."""

from __future__ import annotations

from math import inf, isfinite, nan
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from swarm_training.core.config import RollbackPolicy, checkpoints_needed
from swarm_training.rollback.divergence import Diverged, LossHistory, agreed_loss, observe

POLICIES = st.builds(
    lambda margin, patience, window, warmup: RollbackPolicy(margin, patience, max(window, warmup), warmup),
    *(st.sampled_from([0.5, 1.0]), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4)),
)
LOSSES = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, nan, inf, -inf])  # many are just as far from the median as they may


@given(POLICIES, st.lists(LOSSES, max_size=40))
def test_a_run_has_diverged_if_its_losses_are_not_finite_or_too_high_for_so_many_steps(
    policy: RollbackPolicy, losses: list[float]
) -> None:
    """By the definition, computed anew at every step."""
    history, usual, row = LossHistory(), list[float](), list[int]()
    for step, loss in enumerate(losses):
        history, verdict = observe(policy, history, step, loss)
        seen = usual[-policy.window :]
        if isfinite(loss) and (len(seen) < policy.warmup or loss <= median(seen) + policy.margin):
            usual.append(loss)
            row = []
            assert verdict is None
            continue
        row.append(step)
        if not isfinite(loss):
            assert verdict == Diverged(row[0], f"the loss of step {step} is not finite")
        elif len(row) < policy.patience:
            assert verdict is None
        else:
            above = f"was above its median of {median(seen):.3g} by {policy.margin:g}"
            assert verdict == Diverged(row[0], f"the loss {above} from step {row[0]} to {step}")


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
