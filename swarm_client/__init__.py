"""The client library: it runs and fine-tunes models whose blocks are on other machines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_client.adapters.labelled_positions import LabelledPositions
    from swarm_client.core.config import ClientConfig, Timeouts
    from swarm_client.model.model import DistributedModel, DistributedModelForSequenceClassification
    from swarm_protocol.errors import (
        AccessDenied,
        NoRoute,
        NoSwarm,
        PeerBusy,
        PeerError,
        RecoveryFailed,
        RequestRejected,
        SwarmError,
        TrainingDiverged,
    )

__all__ = [
    "AccessDenied",
    "ClientConfig",
    "DistributedModel",
    "DistributedModelForSequenceClassification",
    "LabelledPositions",
    "NoRoute",
    "NoSwarm",
    "PeerBusy",
    "PeerError",
    "RecoveryFailed",
    "RequestRejected",
    "SwarmError",
    "Timeouts",
    "TrainingDiverged",
]


def __getattr__(name: str) -> Any:
    """Load a class at its first use, because commands such as ``status`` need no transformers."""
    if name in ("ClientConfig", "Timeouts"):
        return getattr(import_module("swarm_client.core.config"), name)
    if name == "LabelledPositions":
        return import_module("swarm_client.adapters.labelled_positions").LabelledPositions
    if name in __all__:
        if name.startswith("Distributed"):
            # Without this, the import of transformers would read the sources of all of its models.
            import_module("swarm_protocol.imports.model_index").remember_models()
        module = "swarm_client.model.model" if name.startswith("Distributed") else "swarm_protocol.errors"
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
