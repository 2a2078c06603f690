"""The identity with which a client comes: a new key, or a member of a private swarm."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_client.core.config import ClientConfig
from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.access.tokens import Role
from swarm_protocol.net.identity import Identity


@dataclass(frozen=True)
class ClientAccess:
    """A client's identity and rights.

    Attributes:
        token: the membership token; empty if the client is no member.
        control: the check that servers are members; None: all peers that answer count as servers.
    """

    identity: Identity
    token: bytes = field(default=b"", repr=False)
    control: AccessControl | None = None

    @classmethod
    def of(cls, config: ClientConfig) -> ClientAccess:
        """Return the access from the files in the configuration, or from the environment variable SWARM_MEMBERSHIP.

        Raises:
            ValueError: a file cannot be used, or the files do not fit together.
        """
        swarm_key = SwarmKey.parse(config.swarm_key) if config.swarm_key else None
        member = MemberCredentials.read(config.membership)
        own = None if config.identity is None else Identity.load(config.identity)
        if member is None:
            control = None if swarm_key is None else AccessControl(swarm_key)
            return cls(own or Identity.generate(), control=control)
        member.require(Role.CLIENT, swarm_key)
        return cls(member.identity_or(own), member.token, AccessControl(member.grant.swarm_key))
