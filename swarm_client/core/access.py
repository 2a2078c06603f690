"""The identity with which a client comes: a new key, or a member of a private swarm."""

from __future__ import annotations

from swarm_client.core.config import ClientConfig
from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.access.tokens import Role


def client_access(config: ClientConfig) -> SwarmAccess:
    """Return the access from the files in the configuration. Raise ValueError as ``SwarmAccess.of`` does."""
    return SwarmAccess.of(Role.CLIENT, config.membership, config.identity, config.swarm_key)
