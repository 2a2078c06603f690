"""Runs and fine-tunes models whose blocks live on other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarm_protocol.errors import (
    NoRoute,
    NoSwarm,
    PeerError,
    RecoveryFailed,
    RequestRejected,
    SwarmError,
    TrainingDiverged,
)

if TYPE_CHECKING:
    from swarm_client.model import DistributedModel, DistributedModelForSequenceClassification

__all__ = [
    "DistributedModel",
    "DistributedModelForSequenceClassification",
    "NoRoute",
    "NoSwarm",
    "PeerError",
    "RecoveryFailed",
    "RequestRejected",
    "SwarmError",
    "TrainingDiverged",
]


def __getattr__(name: str) -> Any:
    """Loads the model classes at their first use: commands such as ``status`` need no transformers."""
    if name in ("DistributedModel", "DistributedModelForSequenceClassification"):
        from swarm_client import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
