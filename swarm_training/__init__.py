"""Volunteers train one model together: gradients are accumulated at everybody's own pace, averaged, and applied."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Loads classes at their first use: decisions of this package need neither torch nor grpc."""
    if name == "TrainingRun":
        return import_module("swarm_training.run.training_run").TrainingRun
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
