"""Sums contributions by user: a pure value of the rounds that were added, in room that does not grow with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from swarm_protocol.access.organiser import SwarmKey
from swarm_training.ledger.contributions import Moment, Round, verify_round


@dataclass(frozen=True)
class LedgerLimits:
    """
    Attributes:
        max_samples: of one peer in one round.
        min_peers: of a round: a peer alone could countersign itself.
        keep_steps: the newest, whose rounds are kept for others; rounds of older ones are refused.
        max_users: further ones are refused.
    """

    max_samples: int
    min_peers: int = 2
    keep_steps: int = 1000
    max_users: int = 10_000


@dataclass(frozen=True)
class UserTotal:
    samples: int = 0
    rounds: int = 0


class Ledger:
    """Of one run. Whoever adds the same rounds, in whatever order within ``keep_steps``, has the same totals."""

    def __init__(self, run: str, limits: LedgerLimits, organiser: SwarmKey | None = None) -> None:
        self._run = run
        self._limits = limits
        self._organiser = organiser
        self._totals: dict[str, UserTotal] = {}
        self._rounds: dict[Moment, dict[bytes, bytes]] = {}  # of the newest steps; by digest
        self._peers: dict[Moment, set[str]] = {}  # that have contributed to them
        self._forgotten: Moment | None = None  # rounds of this and earlier steps are refused

    def add(self, data: bytes) -> Round | None:
        """A countersigned round; None if it is known already.

        Raises:
            ValueError: it is not valid, too old, of another run, or a peer has contributed to this step elsewhere.
        """
        round_ = verify_round(data, self._organiser)
        moment, digest = round_.moment, hashlib.sha256(data).digest()
        if digest in self._rounds.get(moment, {}):
            return None
        self._require_fitting(round_)
        self._rounds.setdefault(moment, {})[digest] = data
        self._peers.setdefault(moment, set()).update(each.contribution.peer_id for each in round_.credited)
        for each in round_.credited:
            total = self._totals.get(each.user, UserTotal())
            self._totals[each.user] = UserTotal(total.samples + each.contribution.samples, total.rounds + 1)
        while len(self._rounds) > self._limits.keep_steps:
            self._forgotten = min(self._rounds)
            del self._rounds[self._forgotten], self._peers[self._forgotten]
        return round_

    def _require_fitting(self, round_: Round) -> None:
        if round_.run != self._run:
            raise ValueError("the round is of another run")
        if self._forgotten is not None and round_.moment <= self._forgotten:
            raise ValueError(f"the round of step {round_.moment.step} is too old for this ledger")
        if len(round_.credited) < self._limits.min_peers:
            raise ValueError(f"a round of {len(round_.credited)} peers: expected at least {self._limits.min_peers}")
        known = self._peers.get(round_.moment, set())
        for each in round_.credited:
            if each.contribution.samples > self._limits.max_samples:
                samples, most = each.contribution.samples, self._limits.max_samples
                raise ValueError(f"a contribution of {samples} samples: expected at most {most}")
            if each.contribution.peer_id in known:
                raise ValueError(f"peer {each.contribution.peer_id} has contributed to this step in another round")
        new = {each.user for each in round_.credited} - self._totals.keys()
        if len(self._totals) + len(new) > self._limits.max_users:
            raise ValueError(f"the ledger has {len(self._totals)} users: expected no more")

    def totals(self) -> dict[str, UserTotal]:
        """By user, most samples first."""
        return dict(sorted(self._totals.items(), key=lambda item: (-item[1].samples, item[0])))

    def rounds(self) -> list[bytes]:
        """Of the newest steps, oldest first, as they were signed: for others to add and check."""
        return [data for moment in sorted(self._rounds) for data in self._rounds[moment].values()]


def summed(run: str, limits: LedgerLimits, organiser: SwarmKey | None, rounds: Iterable[bytes]) -> dict[str, UserTotal]:
    """What anybody can compute from rounds that were handed on. Raises ValueError if one of them is not valid."""
    ledger = Ledger(run, limits, organiser)
    for data in rounds:
        ledger.add(data)
    return ledger.totals()
