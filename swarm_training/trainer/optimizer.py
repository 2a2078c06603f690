"""What Trainer takes for its optimizer and schedule: stepping it hands the gradients to the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

Step = Callable[[], None]


class RunOptimizer(torch.optim.Optimizer):
    """Has no state of its own: that of the run's optimizer is in the checkpoints of the run."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Step) -> None:
        groups = [{"params": list(group["params"]), "lr": group["lr"]} for group in optimizer.param_groups]
        super().__init__(groups, {})
        self._give = step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns no loss
        """Gradients are the run's from here on."""
        assert closure is None
        self._give()


class RunSchedule(LRScheduler):
    """Shows the learning rates of the run's optimizer, which change by global steps, and changes nothing."""

    def __init__(self, shown: RunOptimizer, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        super().__init__(shown)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [float(group["lr"]) for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state
