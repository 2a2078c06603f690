"""Runs and fine-tunes models whose blocks live on other machines."""

from swarm_client.model import DistributedModel, DistributedModelForSequenceClassification
from swarm_protocol.errors import NoRoute, NoSwarm, PeerError, RequestRejected, SwarmError

__all__ = [
    "DistributedModel",
    "DistributedModelForSequenceClassification",
    "NoRoute",
    "NoSwarm",
    "PeerError",
    "RequestRejected",
    "SwarmError",
]
