"""The mixture-of-experts package: experts run on servers, and the client trains the gate (Learning@home)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_training.experts.core.config import ExpertServerConfig, MixtureConfig
    from swarm_training.experts.mixture.client import ExpertClient
    from swarm_training.experts.mixture.mixture import RemoteMixtureOfExperts
    from swarm_training.experts.server.expert_server import ExpertServer
    from swarm_training.experts.server.registry import register_expert

__all__ = [
    "ExpertClient",
    "ExpertServer",
    "ExpertServerConfig",
    "MixtureConfig",
    "RemoteMixtureOfExperts",
    "register_expert",
]

_MODULES = {
    "ExpertClient": "mixture.client",
    "ExpertServer": "server.expert_server",
    "MixtureConfig": "core.config",
    "RemoteMixtureOfExperts": "mixture.mixture",
    "ExpertServerConfig": "core.config",
    "register_expert": "server.registry",
}


def __getattr__(name: str) -> Any:
    """Load classes at their first use, because the pure parts of this package need neither torch nor grpc."""
    if name in _MODULES:
        return getattr(import_module(f"swarm_training.experts.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
