"""Signed grants, which make a peer a member of a private swarm, and signed revocations, which withdraw grants."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from swarm_protocol.access.organiser import OrganiserKey, SwarmKey
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.printable import printable

M = TypeVar("M", bound=Message)
ID_BYTES = 16
MAX_TOKEN_BYTES = 1024
MAX_MEMBER_NAME_CHARS = 64
_MAX_PEER_ID_CHARS = 64
# The signed bytes begin with one of these prefixes, so that a grant never passes for a revocation.
_GRANT, _REVOCATION = b"swarm grant 1\0", b"swarm revocation 1\0"


class Role(IntEnum):
    SERVER = pb.ROLE_SERVER
    CLIENT = pb.ROLE_CLIENT
    TRAINER = pb.ROLE_TRAINER
    MODERATOR = pb.ROLE_MODERATOR

    @classmethod
    def parse(cls, text: str) -> Role:
        """Parse the name of a role; raise ValueError if there is no such role."""
        names = [role.name.lower() for role in cls]
        if text not in names:
            raise ValueError(f"role {text!r} is unknown: expected one of {', '.join(names)}")
        return cls[text.upper()]

    def __str__(self) -> str:
        return self.name.lower()

    def may_act_as(self, role: Role) -> bool:
        """Return whether a member with this role may act in ``role``: servers and moderators are trainers too."""
        if role in (Role.SERVER, Role.MODERATOR):
            return self is role
        return role is Role.CLIENT or self is not Role.CLIENT


@dataclass(frozen=True)
class Grant:
    """A grant that makes one peer a member from ``granted_at`` until ``expires_at`` (Unix time in seconds)."""

    swarm_key: SwarmKey
    id: bytes
    role: Role
    name: str
    peer_id: str
    granted_at: float
    expires_at: float

    def __post_init__(self) -> None:
        if len(self.id) != ID_BYTES:
            raise ValueError(f"an id of {len(self.id)} bytes: expected {ID_BYTES}")
        if not 0 < len(self.name) <= MAX_MEMBER_NAME_CHARS or not self.name.isprintable():
            raise ValueError(
                f"{printable(self.name, 40)!r} is no name of a member: expected 1 to {MAX_MEMBER_NAME_CHARS} "
                "printable characters"
            )
        if not 0 < len(self.peer_id) <= _MAX_PEER_ID_CHARS or not (self.peer_id.isascii() and self.peer_id.isalnum()):
            raise ValueError(
                f"{printable(self.peer_id, 60)!r} is no peer id: expected what `swarm keys identity` prints"
            )
        if not (isfinite(self.granted_at) and isfinite(self.expires_at) and self.granted_at < self.expires_at):
            raise ValueError(
                f"the grant would last from {self.granted_at} until {self.expires_at}: expected an end after its start"
            )

    @classmethod
    def new(cls, key: SwarmKey, role: Role, name: str, peer_id: str, granted_at: float, expires_at: float) -> Grant:
        return cls(key, secrets.token_bytes(ID_BYTES), role, name, peer_id, granted_at, expires_at)

    def signed(self, key: OrganiserKey) -> bytes:
        """Return the token that the member shows: this grant, signed."""
        message = pb.Grant(
            swarm_key=self.swarm_key.data,
            id=self.id,
            role=self.role.value,
            name=self.name,
            peer_id=self.peer_id,
            granted_at=self.granted_at,
            expires_at=self.expires_at,
        )
        return _signed(key, _GRANT, message.SerializeToString())

    @classmethod
    def parse(cls, token: bytes) -> Grant:
        """Parse a grant of any swarm, expired or not; raise ValueError unless its own organiser has signed it."""
        content, signature = _unsigned(token)
        message = _parsed(pb.Grant, content)
        grant = cls(
            SwarmKey(message.swarm_key),
            message.id,
            Role(message.role),
            message.name,
            message.peer_id,
            message.granted_at,
            message.expires_at,
        )
        if not grant.swarm_key.has_signed(_GRANT + content, signature):
            raise ValueError("the organiser of the swarm has not signed the grant")
        return grant


@dataclass(frozen=True)
class Revocation:
    """A permanent withdrawal of a grant. It matters until ``expires_at``, when the grant itself expires."""

    swarm_key: SwarmKey
    grant_id: bytes
    expires_at: float

    def signed(self, key: OrganiserKey) -> bytes:
        message = pb.Revocation(swarm_key=self.swarm_key.data, grant_id=self.grant_id, expires_at=self.expires_at)
        return _signed(key, _REVOCATION, message.SerializeToString())

    @classmethod
    def parse(cls, data: bytes) -> Revocation:
        """Parse a revocation; raise ValueError unless its own organiser has signed it."""
        content, signature = _unsigned(data)
        message = _parsed(pb.Revocation, content)
        revocation = cls(SwarmKey(message.swarm_key), message.grant_id, message.expires_at)
        if len(revocation.grant_id) != ID_BYTES or not isfinite(revocation.expires_at):
            raise ValueError("the revocation names no grant")
        if not revocation.swarm_key.has_signed(_REVOCATION + content, signature):
            raise ValueError("the organiser of the swarm has not signed the revocation")
        return revocation


def _signed(key: OrganiserKey, kind: bytes, content: bytes) -> bytes:
    return pb.Signed(content=content, signature=key.sign(kind + content)).SerializeToString()


def _unsigned(data: bytes) -> tuple[bytes, bytes]:
    if len(data) > MAX_TOKEN_BYTES:
        raise ValueError(f"a signed statement has {len(data)} bytes: expected at most {MAX_TOKEN_BYTES}")
    message = _parsed(pb.Signed, data)
    return message.content, message.signature


def _parsed(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ValueError(f"the bytes are no {kind.DESCRIPTOR.name}") from None
