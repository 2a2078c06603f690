"""Sums contributions by user: a pure value of the rounds that were added, in room that does not grow with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm_protocol.access.organiser import SwarmKey
from swarm_training.core.moment import Moment
from swarm_training.ledger.contributions import Round, moment_of, restore_round, verify_round

_MAX_BATCHES = 4  # that one peer is credited with in one round: honest ones have more than one if a call brings many
_DIGEST_BYTES = 8  # of SHA-256: nobody can make a round that is taken for a given other one
FIRST, LAST = Moment(0, 0), Moment(1 << 32, 0)


@dataclass(frozen=True)
class LedgerLimits:
    """
    Attributes:
        max_samples: of one peer in one round.
        min_peers: of a round, its leader included: a peer alone could countersign what it likes.
        keep_steps, keep_bytes: the newest steps, whose rounds are kept for others; rounds of older ones are refused.
        max_rounds: of one step: each group has one, and another if its leader fails at the end.
        max_users: further ones are refused.
    """

    max_samples: int
    min_peers: int = 2
    keep_steps: int = 4096
    keep_bytes: int = 64 << 20
    max_rounds: int = 128
    max_users: int = 10_000

    @classmethod
    def of(cls, target_batch_size: int) -> LedgerLimits:
        return cls(max_samples=_MAX_BATCHES * target_batch_size)


@dataclass(frozen=True)
class UserTotal:
    """``rounds``: those in which a peer of the user was credited, for each of the peers."""

    samples: int = 0
    rounds: int = 0


@dataclass
class _Step:
    """``peers``: by peer id, the samples and the user that count. ``seen``: rounds that need not come again."""

    rounds: dict[bytes, bytes] = field(default_factory=dict)  # by digest
    peers: dict[str, tuple[int, str]] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)


class Ledger:
    """Of one run. Whoever adds the same rounds, in whatever order within ``keep_steps``, has the same totals.

    A step can have several rounds: each group has one, and if a leader fails after it has signed, the next one signs
    another. A peer is credited once a step all the same, with the largest number of samples that it has signed for it:
    an honest peer has signed one that came to something. A maximum does not depend on the order, and no leader can
    take anything away by countersigning what a peer had signed for an earlier meeting of that step.
    """

    def __init__(self, run: str, limits: LedgerLimits, organiser: SwarmKey | None = None) -> None:
        self.run = run
        self.limits = limits
        self.organiser = organiser
        self.num_rounds = 0  # that have added something, forgotten ones too
        self._totals: dict[str, UserTotal] = {}
        self._steps: dict[Moment, _Step] = {}  # the newest
        self._size_bytes = 0  # of their rounds
        self._since = FIRST  # rounds of earlier moments are refused

    def add(self, data: bytes) -> Round | None:
        """A countersigned round; None if it adds nothing to what is known already.

        Raises:
            ValueError: it is not valid, too old, or of another run.
        """
        if self._is_seen(data, moment_of(data, self.run)):
            return None
        round_ = verify_round(data, self.organiser)
        return round_ if self.take(data, round_) else None

    def restore(self, data: bytes) -> None:
        """A round that was added before; peers' signatures are not checked. Raises ValueError if it does not fit."""
        self.take(data, restore_round(data, self.organiser))

    @property
    def newest(self) -> Moment | None:
        """Of the rounds that are known."""
        return max(self._steps, default=None)

    def wants(self, data: bytes, newest: Moment | None) -> bool:
        """Whether it is worth verifying: a round that is not known, of a moment that is kept, not after ``newest``.

        Raises ValueError if it is no round of this run.
        """
        moment = moment_of(data, self.run)
        is_due = self._since <= moment and (newest is None or moment <= newest)
        return is_due and not self._is_seen(data, moment)

    def take(self, data: bytes, round_: Round) -> bool:
        """``round_``: what ``verify_round`` says of the data. Returns whether it adds anything; raises as ``add``."""
        step = self._steps.get(round_.moment, _Step())
        digest = digest_of(data)
        if digest in step.seen:
            return False
        new = {each.contribution.peer_id: (each.contribution.samples, each.user) for each in round_.credited}
        new = {peer: credit for peer, credit in new.items() if credit > step.peers.get(peer, (0, ""))}
        self._require_fitting(round_, step, {user for _, user in new.values()})
        self._steps[round_.moment] = step
        if len(step.seen) < 2 * self.limits.max_rounds:
            step.seen.add(digest)
        if not new:
            return False
        for peer, (samples, user) in new.items():
            if peer in step.peers:
                old_samples, old_user = step.peers[peer]
                self._count(old_user, -old_samples, -1)
            self._count(user, samples, 1)
        step.peers.update(new)
        step.rounds[digest] = data
        self.num_rounds += 1
        self._size_bytes += len(data)
        self._forget()
        return True

    def totals(self) -> dict[str, UserTotal]:
        """By user, most samples first."""
        return dict(sorted(self._totals.items(), key=lambda item: (-item[1].samples, item[0])))

    def rounds(self) -> list[bytes]:
        """Of the newest steps, oldest first, as they were signed: for others to add and check."""
        return [data for moment in sorted(self._steps) for data in self._steps[moment].rounds.values()]

    def seen(self, max_bytes: int) -> tuple[Moment, bytes]:
        """The digests of all rounds that need not come again, joined, since a moment: the first whose rounds are taken,
        or a later one if they are too many."""
        found = b""
        for moment in sorted(self._steps, reverse=True):
            digests = b"".join(sorted(self._steps[moment].seen))
            if len(found) + len(digests) > max_bytes:
                return Moment(moment.rollbacks, moment.step + 1), found
            found += digests
        return self._since, found

    def lacking(self, since: Moment, known: bytes, max_bytes: int) -> tuple[list[bytes], bool]:
        """Rounds that somebody lacks who knows these, oldest first, as many as fit; and whether there are more."""
        skipped = {known[at : at + _DIGEST_BYTES] for at in range(0, len(known), _DIGEST_BYTES)}
        found: list[bytes] = []
        size = 0
        for moment in sorted(self._steps):
            for digest, data in self._steps[moment].rounds.items() if moment >= since else ():
                if digest in skipped:
                    continue
                size += len(data)
                if size > max_bytes:
                    return found, True
                found.append(data)
        return found, False

    def _is_seen(self, data: bytes, moment: Moment) -> bool:
        return moment in self._steps and digest_of(data) in self._steps[moment].seen

    def _require_fitting(self, round_: Round, step: _Step, users: Iterable[str]) -> None:
        if round_.run != self.run:
            raise ValueError("the round is of another run")
        if round_.moment < self._since:
            raise ValueError(f"the round of step {round_.moment.step} is too old for this ledger")
        peers = {round_.leader, *(each.contribution.peer_id for each in round_.credited)}
        if len(peers) < self.limits.min_peers:
            raise ValueError(f"a round of {len(peers)} peers: expected at least {self.limits.min_peers}")
        most = self.limits.max_samples
        for each in round_.credited:
            if each.contribution.samples > most:
                raise ValueError(f"a contribution of {each.contribution.samples} samples: expected at most {most}")
        if len(step.rounds) >= self.limits.max_rounds:
            raise ValueError(f"step {round_.moment.step} has {len(step.rounds)} rounds: expected no more")
        if len(self._totals.keys() | set(users)) > self.limits.max_users:
            raise ValueError(f"the ledger has {len(self._totals)} users: expected no more")

    def _count(self, user: str, samples: int, rounds: int) -> None:
        old = self._totals.get(user, UserTotal())
        self._totals[user] = UserTotal(old.samples + samples, old.rounds + rounds)
        if not self._totals[user].rounds:
            del self._totals[user]

    def _forget(self) -> None:
        while len(self._steps) > self.limits.keep_steps or self._size_bytes > self.limits.keep_bytes:
            oldest = min(self._steps)
            self._since = Moment(oldest.rollbacks, oldest.step + 1)
            self._size_bytes -= sum(map(len, self._steps.pop(oldest).rounds.values()))


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]


def summed(run: str, limits: LedgerLimits, organiser: SwarmKey | None, rounds: Iterable[bytes]) -> dict[str, UserTotal]:
    """What anybody can compute from rounds that were handed on. Raises ValueError if one of them is not valid."""
    ledger = Ledger(run, limits, organiser)
    for data in rounds:
        ledger.add(data)
    return ledger.totals()
