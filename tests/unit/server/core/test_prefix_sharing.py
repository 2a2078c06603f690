"""Between whom a server shares prefixes if nobody says: members of its swarm, or clients of its machine."""

from __future__ import annotations

import pytest

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_server.core.config import ServerConfig
from swarm_server.core.prefix_sharing import prefix_sharing
from tests.quick_keys import new_identity

NOBODYS = SwarmAccess(new_identity())
PRIVATE = SwarmAccess(new_identity(), b"token", AccessControl(OrganiserKey.generate().public))
HERE, LAN, EVERYWHERE = "127.0.0.1", "192.168.1.5", "0.0.0.0"


@pytest.mark.parametrize(
    ("access", "host", "fields", "expected"),
    [
        (NOBODYS, HERE, {}, "all"),
        (NOBODYS, "127.0.0.9", {}, "all"),
        (NOBODYS, "::1", {}, "all"),
        (NOBODYS, LAN, {}, "own"),
        (NOBODYS, EVERYWHERE, {}, "own"),
        (NOBODYS, "::", {}, "own"),
        (NOBODYS, HERE, {"announce_address": "relay.example:31330"}, "own"),  # others come by a tunnel
        (PRIVATE, HERE, {}, "all"),
        (PRIVATE, EVERYWHERE, {}, "all"),
        (PRIVATE, EVERYWHERE, {"open_to_clients": True}, "own"),
    ],
)
def test_auto(access: SwarmAccess, host: str, fields: dict[str, object], expected: str) -> None:
    assert prefix_sharing(ServerConfig(**fields), access, host) == expected


@pytest.mark.parametrize("chosen", ["all", "own", "none"])
@pytest.mark.parametrize(("access", "host"), [(NOBODYS, EVERYWHERE), (NOBODYS, HERE), (PRIVATE, HERE)])
def test_what_the_user_says(access: SwarmAccess, host: str, chosen: str) -> None:
    assert prefix_sharing(ServerConfig(prefix_cache=chosen), access, host) == chosen
