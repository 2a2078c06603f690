"""Volunteers train one model together: gradients are accumulated at everybody's own pace, averaged, and applied."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_training.core.config import TrainingConfig
    from swarm_training.run.training_run import TrainingRun

__all__ = ["TrainingConfig", "TrainingRun"]


def __getattr__(name: str) -> Any:
    """Loads classes at their first use: decisions of this package need neither torch nor grpc."""
    if name == "TrainingConfig":
        return import_module("swarm_training.core.config").TrainingConfig
    if name == "TrainingRun":
        return import_module("swarm_training.run.training_run").TrainingRun
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
