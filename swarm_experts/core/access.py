"""As whom a server of experts or a layer comes, and who may take part: everybody, or members of a private swarm."""

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
    """
    Attributes:
        token: empty without a membership.
        control: that of a private swarm; None: everybody may take part.
        lock: of a server's membership file, held open: two servers with one key would be one peer.
    """

    identity: Identity
    token: bytes = field(default=b"", repr=False)
    control: AccessControl | None = None
    lock: IO[bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, role: Role, identity: Identity | None = None, membership: Path | None = None) -> Access:
        """That of a member if there is a file, or the environment variable SWARM_MEMBERSHIP has its content.

        Raises:
            ValueError: it cannot be read, is for another role, has expired, is not for this identity, or is in use by
                another server of this machine.
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
        """Another server may have the membership file now."""
        if self.lock is not None:
            self.lock.close()
