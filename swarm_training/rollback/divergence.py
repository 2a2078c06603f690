"""When a run has diverged: decided from losses alone.

As in PaLM (Chowdhery et al., 2022, §5.1): train on from a checkpoint before the spike, without the batches seen since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from swarm_training.core.config import RollbackPolicy


@dataclass(frozen=True)
class LossHistory:
    """Since the run began, or went back.

    Attributes:
        usual: the last losses that were not too high.
        num_high: steps in a row, up to now, whose loss was too high.
    """

    usual: tuple[float, ...] = ()
    num_high: int = 0


@dataclass(frozen=True)
class Diverged:
    """
    Attributes:
        first_step: the first whose loss shows it.
    """

    first_step: int
    reason: str

    @property
    def wanted_step(self) -> int:
        """A checkpoint of it, or an older one, is free of what went wrong: that of ``first_step`` itself is not, since
        it had the wrong loss. The beginning of a run has no older one."""
        return max(self.first_step - 1, 0)


def observe(
    policy: RollbackPolicy, history: LossHistory, step: int, loss: float
) -> tuple[LossHistory, Diverged | None]:
    """``loss``: of the batch of ``step``, before that step was taken. If the run goes on although it has diverged,
    since it has no checkpoint for instance, the next loss that is too high says so again."""
    if isfinite(loss) and not _is_high(policy, history, loss):
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
    """Of a group: the highest that more than half of its members reach; of an odd number, the median.

    ``losses``: one for each member, None if it does not know its own. Every member counts once, as in a quorum, since
    how many samples it had is its own claim; a minority can neither raise nor hide a loss. None: too few know theirs.
    """
    descending = sorted((loss for loss in losses if loss is not None), reverse=True)
    needed = len(losses) // 2 + 1
    return descending[needed - 1] if len(descending) >= needed else None


def _is_high(policy: RollbackPolicy, history: LossHistory, loss: float) -> bool:
    return len(history.usual) >= policy.warmup and loss > median(history.usual) + policy.margin
