"""The identity and rights with which a process takes part in a swarm, public or private."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.access.tokens import Role
from swarm_protocol.net.identity import Identity, locked_key_file


@dataclass(frozen=True)
class SwarmAccess:
    """The identity and access control of one server or client.

    Attributes:
        token: the membership token; empty without a membership.
        control: the check that other peers are members of the private swarm; None if everybody may take part.
        lock: the open and locked file that a server's key was read from, because two servers with one key would be one
            peer. None for clients, and for keys that came from no file.
    """

    identity: Identity
    token: bytes = field(default=b"", repr=False)
    control: AccessControl | None = None
    lock: IO[bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        role: Role,
        membership: Path | None,
        own: Identity | Path | None = None,
        swarm_key: str = "",
        *,
        open_to_clients: bool = False,
    ) -> SwarmAccess:
        """Return the access of a server or client; ``own`` is its identity or key file, by default a new identity.

        A server makes a missing key file, and locks the file that its key comes from. Clients may share a file.

        Raises:
            ValueError: a file cannot be used or is in use, or see ``read_member``.
        """
        member = read_member(role, membership, swarm_key, open_to_clients=open_to_clients)
        lock = None
        if isinstance(own, Path):
            if role is not Role.SERVER:
                own = Identity.load(own)
            elif member is None or member.identity is None:
                own = Identity.load_or_create(own)
                lock = own.lock
            else:  # the membership has a key, which is the only one that its token fits
                own = None
        if member is None:
            control = AccessControl(SwarmKey.parse(swarm_key)) if swarm_key else None
            return cls(own or Identity.generate(), control=control, lock=lock)
        if role is Role.SERVER and member.identity is not None and membership is not None:
            lock = locked_key_file(membership)
        control = AccessControl(member.grant.swarm_key, open_to_clients=open_to_clients)
        return cls(member.identity_or(own), member.token, control, lock)

    def release(self) -> None:
        """Release the file of the key, so that another server may use it."""
        if self.lock is not None:
            self.lock.close()


def read_member(
    role: Role, membership: Path | None, swarm_key: str = "", *, open_to_clients: bool = False
) -> MemberCredentials | None:
    """Read the membership file, or else the variable SWARM_MEMBERSHIP; return None if neither is given.

    Raises:
        ValueError: the membership is not for this role or swarm, has expired, cannot be read, or is missing.
    """
    key = SwarmKey.parse(swarm_key) if swarm_key else None
    member = MemberCredentials.read(membership)
    if member is not None:
        member.require(role, key)
    elif key is not None and role is Role.SERVER:
        raise ValueError("a server of a private swarm must be a member of it: give --membership FILE")
    elif open_to_clients:
        raise ValueError("a swarm that is not private is open to clients: expected --open-to-clients with --membership")
    return member
