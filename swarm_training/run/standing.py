"""A peer's state in the run: its own record, the other peers' records, and the roster that decides the next step."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from swarm_protocol.errors import AccessDenied
from swarm_protocol.net.identity import Identity
from swarm_training.core.record import MAX_EXCLUDED, Progress
from swarm_training.core.signing import read_signed, sign
from swarm_training.evaluation.policy import have_ended
from swarm_training.ledger.moderation import Moderation
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress import policy
from swarm_training.progress.policy import LocalView
from swarm_training.progress.table import ProgressTable

_SMOOTHING = 0.3  # weight of the newest measurement


class PeerState:
    """One peer's state in the run, together with what it knows of the other peers.

    Attributes:
        own: this peer's record.
        roster: ids of the peers that decide about the next step.
        moderation: the moderators' orders, bans among them.
    """

    def __init__(self, own: Progress, identity: Identity, table: ProgressTable, moderation: Moderation) -> None:
        # Milliseconds of Unix time: a restarted process continues above the versions that it has published before.
        self.own = dataclasses.replace(own, version=time.time_ns() // 1_000_000)
        self.roster: tuple[str, ...] = (own.peer_id,)
        self.table = table
        self.moderation = moderation
        self._identity = identity

    def view(self) -> LocalView:
        """Return what this peer knows of the run now, without banned and excluded peers."""
        excluded = self._adopt()
        self.table.ban(self.banned(), self.moderation.banned() | excluded, now())
        return self.table.view(self.own, now())

    def exclude(self, peer_id: str) -> None:
        """Exclude a peer that this peer has found to compute wrongly: accept nothing from it, and publish this."""
        if peer_id not in self.own.excludes:
            self.update(excludes=(*self.own.excludes, peer_id)[-MAX_EXCLUDED:])

    def banned(self) -> frozenset[str]:
        """Return the ids of the peers that moderators have banned, or that this peer excludes. ``view`` has made this
        peer exclude those that most peers exclude."""
        return self.moderation.banned().union(self.own.excludes)

    def require_admitted(self, peer_id: str) -> None:
        """Raise AccessDenied if the peer is banned or excluded."""
        self.moderation.require_admitted(peer_id)
        # `_adopt` copies the votes of most peers into the own record, except a vote against this peer itself.
        if peer_id in self.own.excludes or (peer_id == self.own.peer_id and peer_id in self._excluded_by_most()):
            raise AccessDenied(
                f"{peer_id} is excluded from the run: other peers have repeated its computation and got another "
                "result; its hardware or software may be at fault"
            )

    def _adopt(self) -> frozenset[str]:
        """Exclude the peers that most peers exclude, so that later joiners cannot outvote them. Return their ids."""
        excluded = self._excluded_by_most() - {self.own.peer_id}
        for peer_id in sorted(excluded):
            self.exclude(peer_id)
        return excluded

    def _excluded_by_most(self) -> frozenset[str]:
        return policy.excluded_by_most([self.own, *self.table.heard(now())])

    @property
    def is_lost(self) -> bool:
        """Return whether the other peers have gone on without this peer, or have another state."""
        view = self.view()
        return policy.is_behind(view, self.roster) or policy.is_in_minority(view)

    @property
    def others_have_ended(self) -> bool:
        """Return whether the other peers have ended the run at a later moment."""
        return have_ended(self.own, self.roster, self.table.ended())

    def set_roster(self, roster: tuple[str, ...]) -> None:
        self.roster = roster

    def update(self, **changes: Any) -> None:
        self.own = dataclasses.replace(self.own, **changes)

    def renew(self) -> pb.SignedProgress:
        """Sign and return this peer's present record in a new version."""
        self.update(version=self.own.version + 1)
        signed = sign(self.own, self._identity)
        self.table.add(signed, now())
        return signed

    def note(self, signed: pb.SignedProgress) -> Progress:
        """Add a record to the table, and return its content. Raise ValueError if it is not a record of this run."""
        self.table.add(signed, now())
        return read_signed(signed)


def smoothed(old: float, new: float) -> float:
    """Return the exponential moving average after the measurement ``new``; ``old`` is 0 if there was none."""
    return new if old == 0 else old + _SMOOTHING * (new - old)


def now() -> float:
    return asyncio.get_running_loop().time()
