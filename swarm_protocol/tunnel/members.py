"""Membership proofs for relays of a private swarm, which carry bytes only for members."""

from __future__ import annotations

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.tokens import Role
from swarm_protocol.errors import AccessDenied
from swarm_protocol.net.identity import Identity, verified_signer
from swarm_protocol.pb import tunnel_pb2 as pb

_SENTENCE = b"swarm tunnel: these two peers, from one to the other\0"  # no other signed message begins like this


class RelayCredentials:
    """The membership of a peer that opens streams; it is empty in a public swarm."""

    def __init__(self, identity: Identity | None = None, token: bytes = b"") -> None:
        self._identity, self._token = identity, token

    def shown(self, caller: str, relay: str) -> pb.Member:
        """Return a proof for the stream between two peer ids, ``caller`` and ``relay``; it is invalid elsewhere."""
        if self._identity is None or not self._token:
            return pb.Member()
        return pb.Member(
            token=self._token,
            public_key=self._identity.public_key,
            signature=self._identity.private_key.sign(_said(caller, relay)),
        )


def require_member(access: AccessControl | None, role: Role, member: pb.Member, caller: str, relay: str) -> None:
    """Raise AccessDenied if the swarm is private (``access``) and the caller acts for no member with this role."""
    if access is None:
        return
    peer_id = ""
    if member.token:
        try:
            peer_id = verified_signer(
                _said(caller, relay), member.public_key, member.signature, "it was signed for another stream"
            )
        except ValueError as error:
            raise AccessDenied(f"the membership that was shown is not the caller's: {error}") from None
    access.require(role, peer_id, member.token)


def _said(caller: str, relay: str) -> bytes:
    return _SENTENCE + f"{caller} {relay}".encode()
