"""The choice of clients that share keys and values of equal prefixes; response times reveal that they are shared."""

from __future__ import annotations

import ipaddress

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_server.core.config import ServerConfig


def prefix_sharing(config: ServerConfig, access: SwarmAccess, host: str) -> str:
    """Return ``all``, ``own`` or ``none``, for a server that listens on the IP address ``host``.

    The default is ``all`` where clients are known to be members of a private swarm, or on this machine, else ``own``.
    """
    if config.prefix_cache != "auto":
        return config.prefix_cache
    is_private = access.control is not None and not config.open_to_clients
    is_local = ipaddress.ip_address(host).is_loopback and config.announce_address is None
    return "all" if is_private or is_local else "own"
