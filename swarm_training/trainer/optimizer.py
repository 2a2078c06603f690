"""The optimizer and schedule that a Trainer uses: a step of the optimizer passes the gradients to the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

Step = Callable[[], None]


class RunOptimizer(torch.optim.Optimizer):
    """An optimizer without state: the state of the run's optimizer is in the checkpoints of the run."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Step) -> None:
        groups = [{"params": list(group["params"]), "lr": group["lr"]} for group in optimizer.param_groups]
        super().__init__(groups, {})
        self._give = step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pass the gradients to the run. ``closure``: computes them first; its result is returned."""
        result = None if closure is None else closure()
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            self._give()
        return result


class RunSchedule(LRScheduler):
    """A schedule that shows the learning rates of the run's optimizer and changes none: they follow global steps."""

    def __init__(self, shown: RunOptimizer, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        super().__init__(shown)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [float(group["lr"]) for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state
