"""The sum of contributions by user. It depends on the added rounds alone, and its memory does not grow with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm_protocol.access.organiser import SwarmKey
from swarm_training.core.moment import Moment
from swarm_training.ledger.contributions import RoundContributions, moment_of, restore_round, verify_round

_MAX_BATCHES = 4  # the most batches credited to one peer in one round: an honest call can bring more than one
_DIGEST_BYTES = 8  # of SHA-256: nobody can make another round with a given round's digest
FIRST, LAST = Moment(0, 0), Moment(1 << 32, 0)


@dataclass(frozen=True)
class LedgerLimits:
    """The limits of a ledger."""

    max_samples: int  # the samples of one peer in one round
    min_peers: int = 2  # the peers of a round, with its leader: a peer alone could countersign what it likes
    # ``keep_steps``, ``keep_bytes``: the limits of the newest steps, kept for other peers; rounds of older steps are
    # refused.
    keep_steps: int = 4096
    keep_bytes: int = 64 << 20
    max_rounds: int = 128  # the rounds of one step: each group has one, and another if its leader fails at the end
    max_users: int = 10_000  # the users of a run; further ones are refused

    @classmethod
    def of(cls, target_batch_size: int, max_samples: int = 0) -> LedgerLimits:
        """Return the limits of a run. ``max_samples``: those of one peer that count in a step; 0: all do."""
        return cls(max_samples or _MAX_BATCHES * target_batch_size)


@dataclass(frozen=True)
class UserTotal:
    """The total of one user. ``rounds``: each counts once for each of the user's peers that is credited in it."""

    samples: int = 0
    rounds: int = 0


@dataclass
class _Step:
    """The rounds of a step."""

    rounds: dict[bytes, bytes] = field(default_factory=dict)  # the rounds that have added something, by digest
    peers: dict[str, tuple[int, str]] = field(default_factory=dict)  # the samples and the user that count, by peer id
    seen: set[bytes] = field(default_factory=set)  # digests of all known rounds, which other peers need not send


class Ledger:
    """The ledger of one run. Peers that add the same rounds, in any order within ``keep_steps``, have the same totals.

    A step can have several rounds: each group has one, and if a leader fails after signing, the next leader signs
    another. A peer is still credited once a step, with the largest number of samples that it has signed for the step.
    The maximum has two reasons. It does not depend on the order of the rounds. And no leader can take credit away by
    countersigning a contribution that the peer had signed for an earlier meeting of that step.
    """

    def __init__(self, run: str, limits: LedgerLimits, organiser: SwarmKey | None = None) -> None:
        self.run = run
        self.limits = limits
        self.organiser = organiser
        self.num_rounds = 0  # rounds that have added something, including those of steps that are no longer kept
        self._totals: dict[str, UserTotal] = {}
        self._steps: dict[Moment, _Step] = {}  # the newest steps
        self._size_bytes = 0  # of their rounds
        self._since = FIRST  # rounds of earlier moments are refused

    def add(self, data: bytes) -> RoundContributions | None:
        """Verify and add a countersigned round. Return the round; None if it adds nothing new. Raise ValueError if the
        round is not valid, too old, or of another run."""
        if self._is_seen(data, moment_of(data, self.run)):
            return None
        round_ = verify_round(data, self.organiser)
        return round_ if self.take(data, round_) else None

    def restore(self, data: bytes) -> None:
        """Add a round that was verified before, see ``restore_round``. Raise ValueError if it does not fit."""
        self.take(data, restore_round(data, self.organiser))

    @property
    def newest(self) -> Moment | None:
        """Return the newest moment of the known rounds; None if there are none."""
        return max(self._steps, default=None)

    def knows(self, moment: Moment) -> bool:
        """Return whether there is a round of this moment."""
        return moment in self._steps

    def wants(self, data: bytes, newest: Moment | None) -> bool:
        """Return whether a round is worth verifying: it is new, of a moment that is kept, and not after ``newest``.
        Raise ValueError if it is no round of this run."""
        moment = moment_of(data, self.run)
        is_due = self._since <= moment and (newest is None or moment <= newest)
        return is_due and not self._is_seen(data, moment)

    def take(self, data: bytes, round_: RoundContributions) -> bool:
        """Add ``round_``, the verified content of ``data``. Return whether it adds anything. Raise as ``add`` does."""
        step = self._steps.get(round_.moment, _Step())
        digest = digest_of(data)
        if digest in step.seen:
            return False
        new = {each.contribution.peer_id: (each.contribution.samples, each.user) for each in round_.credited}
        # The user decides between equal numbers, so that the order of the rounds does not matter here either.
        new = {peer: credit for peer, credit in new.items() if credit > step.peers.get(peer, (0, ""))}
        self._require_fitting(round_, step, {user for _, user in new.values()})
        self._steps[round_.moment] = step
        if len(step.seen) < 2 * self.limits.max_rounds:  # rounds that add nothing are unlimited, their memory is not
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
        while len(self._steps) > self.limits.keep_steps or self._size_bytes > self.limits.keep_bytes:
            oldest = min(self._steps)
            self._since = Moment(oldest.rollbacks, oldest.step + 1)
            self._size_bytes -= sum(map(len, self._steps.pop(oldest).rounds.values()))
        return True

    def totals(self) -> dict[str, UserTotal]:
        """Return the totals by user, most samples first."""
        return dict(sorted(self._totals.items(), key=lambda item: (-item[1].samples, item[0])))

    def seen(self, max_bytes: int) -> tuple[Moment, bytes]:
        """Return a moment, and the joined digests of all known rounds since then. The moment is the first one whose
        rounds this ledger takes, or a later one if the digests would exceed ``max_bytes``."""
        found = b""
        for moment in sorted(self._steps, reverse=True):
            digests = b"".join(sorted(self._steps[moment].seen))
            if len(found) + len(digests) > max_bytes:
                return Moment(moment.rollbacks, moment.step + 1), found
            found += digests
        return self._since, found

    def lacking(self, since: Moment, known: bytes, max_bytes: int) -> tuple[list[bytes], bool]:
        """Return the rounds since a moment that are not in ``known``, oldest first, and whether more did not fit."""
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

    def _require_fitting(self, round_: RoundContributions, step: _Step, users: Iterable[str]) -> None:
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
            raise ValueError(f"step {round_.moment.step} has {len(step.rounds)} rounds already: expected no more")
        if len(self._totals.keys() | set(users)) > self.limits.max_users:
            raise ValueError(f"the ledger has {len(self._totals)} users already: expected no more")

    def _count(self, user: str, samples: int, rounds: int) -> None:
        old = self._totals.get(user, UserTotal())
        self._totals[user] = UserTotal(old.samples + samples, old.rounds + rounds)
        if not self._totals[user].rounds:
            del self._totals[user]


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]
