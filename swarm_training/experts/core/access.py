"""The identity of a server of experts or of a layer, and access control: everybody, or members of a private swarm."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.tokens import Role
from swarm_protocol.net.identity import Identity, locked_key_file


@dataclass(frozen=True)
class Access:
    """The identity and access control of one server or client.

    Attributes:
        token: the membership token; empty without a membership.
        control: the access control of a private swarm; None if everybody may take part.
        lock: the open membership file of a server: two servers with one key would be one peer.
    """

    identity: Identity
    token: bytes = field(default=b"", repr=False)
    control: AccessControl | None = None
    lock: IO[bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, role: Role, identity: Identity | None = None, membership: Path | None = None) -> Access:
        """Return a member's access if there is a membership file, or if the variable SWARM_MEMBERSHIP has its content.

        Raises:
            ValueError: the membership cannot be read, is for another role, has expired, is not for this identity, or is
                in use by another server of this machine.
        """
        member = MemberCredentials.read(membership)
        if member is None:
            return cls(identity or Identity.generate())
        member.require(role, None)
        lock = None
        if role is Role.SERVER and member.identity is not None and membership is not None:
            lock = locked_key_file(membership)
        return cls(member.identity_or(identity), member.token, AccessControl(member.grant.swarm_key), lock)

    def release(self) -> None:
        """Release the membership file, so that another server may use it."""
        if self.lock is not None:
            self.lock.close()
