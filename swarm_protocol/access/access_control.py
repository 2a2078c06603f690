"""Access control for a private swarm: which peers are members, and what each member may do."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.access.tokens import MAX_TOKEN_BYTES, Grant, Revocation, Role
from swarm_protocol.errors import AccessDenied
from swarm_protocol.wire.printable import printable

CLOCK_SKEW_S = 60.0  # a token counts this long before its grant begins and after it expires
_MAX_KNOWN = 4096  # tokens kept with their parsed grants, because each call of a peer shows its token again


class AccessControl:
    """The access control of one private swarm. It does no I/O, and knows only the revocations passed to ``revoke``."""

    def __init__(
        self, swarm_key: SwarmKey, *, open_to_clients: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """Set the key of the swarm and, with ``open_to_clients``, let any peer act as a client or trainer.

        ``clock`` returns Unix time in seconds.
        """
        self.swarm_key = swarm_key
        self._open_to_clients = open_to_clients
        self._clock = clock
        self._known: dict[bytes, Grant | None] = {}  # by token; None: the token is not valid
        self._revoked: dict[bytes, tuple[float, bytes]] = {}  # by grant id: expiry, signed bytes

    def require(self, role: Role, peer_id: str, token: bytes) -> None:
        """Check that the peer may act in ``role`` with the token that it shows (empty if it shows none).

        Raises:
            AccessDenied: the peer may not; the message gives the reason in one sentence.
        """
        if self._open_to_clients and role in (Role.CLIENT, Role.TRAINER):
            return
        if not token:
            raise AccessDenied("this swarm takes only members: ask its organiser, and give --membership FILE")
        grant = self._grant(token)
        if grant is None or grant.swarm_key != self.swarm_key:
            raise AccessDenied("this swarm takes only members: its organiser has not signed the token that was shown")
        if grant.peer_id != peer_id:
            raise AccessDenied("the token that was shown belongs to another peer")
        who = f"the membership of {printable(grant.name)}"
        now = self._clock()
        if now > grant.expires_at + CLOCK_SKEW_S:
            raise AccessDenied(f"{who} has expired: ask the organiser of the swarm for another")
        if now < grant.granted_at - CLOCK_SKEW_S:
            raise AccessDenied(f"{who} has not begun: a clock is wrong")
        if grant.id in self._revoked:
            raise AccessDenied(f"{who} was revoked")
        if not grant.role.may_act_as(role):
            raise AccessDenied(f"{who} is for the role {grant.role}: expected {role}")

    def is_server(self, peer_id: str, token: bytes) -> bool:
        try:
            self.require(Role.SERVER, peer_id, token)
        except AccessDenied:
            return False
        return True

    def revoke(self, data: bytes) -> bool:
        """Store a signed revocation; return whether it is for this swarm, valid, unexpired and new."""
        revocation = self._revocation(data)
        if revocation is None or revocation.grant_id in self._revoked:
            return False
        self._revoked[revocation.grant_id] = revocation.expires_at, data
        return True

    def is_revocation(self, grant_id: bytes, data: bytes) -> bool:
        """Return whether these bytes revoke this grant of the swarm, and the revocation has not expired."""
        if grant_id in self._revoked and self._revoked[grant_id][1] == data:  # spares the check of the signature
            return True
        revocation = self._revocation(data)
        return revocation is not None and revocation.grant_id == grant_id

    def revocations(self) -> dict[bytes, bytes]:
        """Return the signed bytes of every revocation that has not expired, by grant id."""
        now = self._clock()
        self._revoked = {key: known for key, known in self._revoked.items() if known[0] + CLOCK_SKEW_S >= now}
        return {grant_id: data for grant_id, (_, data) in self._revoked.items()}

    def _revocation(self, data: bytes) -> Revocation | None:
        """Return the revocation, if it is valid, for this swarm, and has not expired."""
        try:
            found = Revocation.parse(data)
        except ValueError:
            return None
        concerns = found.swarm_key == self.swarm_key and found.expires_at + CLOCK_SKEW_S >= self._clock()
        return found if concerns else None

    def _grant(self, token: bytes) -> Grant | None:
        """Parse the token and check its signature, once per token; return None if the token is not valid."""
        if len(token) > MAX_TOKEN_BYTES:
            return None  # a stranger's long tokens would fill the memory that ``_known`` may take
        if token not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            try:
                self._known[token] = Grant.parse(token)
            except ValueError:
                self._known[token] = None
        return self._known[token]
