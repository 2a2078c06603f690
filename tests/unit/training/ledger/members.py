"""An organiser, and members with keys of their own: made once, since RSA keys take a while."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role, SwarmKey
from swarm_protocol.net.identity import Identity
from swarm_training.ledger.ledger import FIRST, Ledger, LedgerLimits, UserTotal
from tests.quick_keys import new_identity

NOW = 1_800_000_000.0
DAY = 86_400.0
ORGANISER = OrganiserKey.generate()


@dataclass(frozen=True)
class Member:
    identity: Identity
    grant: Grant
    token: bytes

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    def with_token(self, **changes: object) -> Member:
        grant = replace(self.grant, **changes)
        return replace(self, grant=grant, token=grant.signed(ORGANISER))


def member(name: str, role: Role = Role.TRAINER) -> Member:
    identity = new_identity()
    grant = Grant.new(ORGANISER.public, role, name, identity.peer_id, NOW - DAY, NOW + DAY)
    return Member(identity, grant, grant.signed(ORGANISER))


ADA, BOB, EVE = member("ada"), member("bob"), member("eve")
MODERATOR = member("mo", Role.MODERATOR)


def signed_rounds(ledger: Ledger) -> list[bytes]:
    """Return the rounds of the newest steps, oldest first, as signed."""
    return ledger.lacking(FIRST, b"", 1 << 40)[0]


def summed(run: str, limits: LedgerLimits, organiser: SwarmKey | None, rounds: Iterable[bytes]) -> dict[str, UserTotal]:
    """Return the totals that anybody can compute from signed rounds. Raises ValueError if a round is not valid."""
    ledger = Ledger(run, limits, organiser)
    for data in rounds:
        ledger.add(data)
    return ledger.totals()
