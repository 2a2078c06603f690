"""When a run goes back to a checkpoint, and which batches it leaves out then: decided from losses alone.

As in PaLM (Chowdhery et al., 2022, §5.1): train on from a checkpoint before the spike, without the batches seen since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median


@dataclass(frozen=True)
class RollbackPolicy:
    """Raises ValueError at construction if a field is out of its range.

    Attributes:
        margin: a loss is too high above the running median plus this.
        patience: so many steps in a row of it cause a rollback; a loss that is not finite does at once.
        window: losses of which the median is taken; those that are too high are not among them.
        warmup: before so many losses were seen, none is too high.
    """

    margin: float = 1.0
    patience: int = 10
    window: int = 100
    warmup: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.margin <= inf:
            raise ValueError(f"margin is {self.margin}: expected a number above 0")
        for name in ("patience", "window", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")


@dataclass(frozen=True)
class LossHistory:
    """
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
        first_step: the first whose loss shows it: a checkpoint that many steps old, or older, is free of it.
    """

    first_step: int
    reason: str


def observe(
    policy: RollbackPolicy, history: LossHistory, step: int, loss: float
) -> tuple[LossHistory, Diverged | None]:
    """``loss``: of the batch of ``step``, before that step was taken."""
    if not isfinite(loss):
        return LossHistory(), Diverged(step, f"the loss of step {step} is not finite")
    if len(history.usual) >= policy.warmup and loss > (middle := median(history.usual)) + policy.margin:
        num_high = history.num_high + 1
        if num_high < policy.patience:
            return LossHistory(history.usual, num_high), None
        first = step - num_high + 1
        reason = f"the loss was above its median of {middle:.3g} by {policy.margin:g} from step {first} to {step}"
        return LossHistory(), Diverged(first, reason)
    return LossHistory((*history.usual, loss)[-policy.window :]), None


def checkpoint_before(steps: Sequence[int], diverged: Diverged) -> int | None:
    """The newest checkpoint of those steps that holds no step whose batch already showed a wrong loss; None: none."""
    return max((step for step in steps if step <= diverged.first_step), default=None)


@dataclass(frozen=True)
class Rollback:
    """After the batch of ``from_step`` was seen, the run went back to the checkpoint of ``to_step``."""

    from_step: int
    to_step: int

    def __post_init__(self) -> None:
        if not 0 <= self.to_step <= self.from_step:
            raise ValueError(f"a rollback from step {self.from_step} to {self.to_step}: expected an earlier step")


def batch_number(step: int, rollbacks: Sequence[Rollback]) -> int:
    """Of the batch that a step trains on, given all rollbacks so far in their order: none is seen again."""
    return step + sum(rollback.from_step + 1 - rollback.to_step for rollback in rollbacks)
