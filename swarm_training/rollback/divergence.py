"""The decision that a run has diverged, from losses alone.

The remedy is PaLM's (Chowdhery et al., 2022, §5.1): train from a checkpoint before the spike, skip the batches since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from swarm_training.core.config import RollbackPolicy


@dataclass(frozen=True)
class LossHistory:
    """The losses since the run began, or since it last went back."""

    usual: tuple[float, ...] = ()  # the last losses that were not too high
    num_high: int = 0  # the number of steps in a row, up to now, whose loss was too high


@dataclass(frozen=True)
class Diverged:
    """The finding that a run has diverged; the loss of ``first_step`` is the first that shows it."""

    first_step: int
    reason: str

    @property
    def wanted_step(self) -> int:
        """Return the last step whose checkpoint is good: the state of ``first_step`` already had the wrong loss. No
        checkpoint is older than the beginning of a run, step 0."""
        return max(self.first_step - 1, 0)


def observe(
    policy: RollbackPolicy, history: LossHistory, step: int, loss: float
) -> tuple[LossHistory, Diverged | None]:
    """Return the new history, and a divergence if there is one. ``loss``: that of the batch of ``step``, before the
    step. A run may have to go on although it has diverged, for lack of a checkpoint. Then the next high loss shows the
    divergence again."""
    is_high = len(history.usual) >= policy.warmup and loss > median(history.usual) + policy.margin
    if isfinite(loss) and not is_high:
        return LossHistory((*history.usual, loss)[-policy.window :]), None
    later = LossHistory(history.usual, history.num_high + 1)
    first = step - history.num_high
    if not isfinite(loss):
        return later, Diverged(first, f"the loss of step {step} is not finite")
    if later.num_high < policy.patience:
        return later, None
    middle = median(history.usual)
    reason = f"the loss was above its median of {middle:.3g} by {policy.margin:g} from step {first} to {step}"
    return later, Diverged(first, reason)


def agreed_loss(losses: Sequence[float | None]) -> float | None:
    """Return the highest loss that more than half of a group's members reach: the median, if their number is odd.

    ``losses``: one for each member, None if unknown. The result is None if too few are known. Every member counts once,
    as in a quorum, since its number of samples is its own claim. A minority can neither raise nor hide a loss.
    """
    descending = sorted((loss for loss in losses if loss is not None), reverse=True)
    needed = len(losses) // 2 + 1
    return descending[needed - 1] if len(descending) >= needed else None
