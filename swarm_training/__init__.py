"""Volunteers train one model together: each accumulates gradients at its own pace; they are averaged, and applied."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_training.checkpoints.checkpoint import Checkpoint
    from swarm_training.checkpoints.flat_state import load_optimizer
    from swarm_training.checkpoints.store import CheckpointDirectory
    from swarm_training.core.config import RollbackPolicy, TrainingConfig
    from swarm_training.core.moment import Moment
    from swarm_training.evaluation.evaluation import Evaluation
    from swarm_training.optim.local_steps import LocalSteps
    from swarm_training.run.options import RunOptions
    from swarm_training.run.training_run import TrainingRun
    from swarm_training.volunteering import volunteer

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "Evaluation",
    "LocalSteps",
    "Moment",
    "RollbackPolicy",
    "RunOptions",
    "TrainingConfig",
    "TrainingRun",
    "load_optimizer",
    "volunteer",
]

_MODULES = {
    "Checkpoint": "checkpoints.checkpoint",
    "CheckpointDirectory": "checkpoints.store",
    "Evaluation": "evaluation.evaluation",
    "LocalSteps": "optim.local_steps",
    "Moment": "core.moment",
    "RollbackPolicy": "core.config",
    "RunOptions": "run.options",
    "TrainingConfig": "core.config",
    "TrainingRun": "run.training_run",
    "load_optimizer": "checkpoints.flat_state",
    "volunteer": "volunteering",
}


def __getattr__(name: str) -> Any:
    """Load a class at its first use, because modules of this package without I/O need neither torch nor grpc."""
    if name in _MODULES:
        return getattr(import_module(f"swarm_training.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
