"""A peer's knowledge of one attempt at a step, and the check that a broadcast is valid. No I/O."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarm_training.robust.instructions import StepRecord
from swarm_training.robust.jury import evidence, suspects
from swarm_training.robust.messages import (
    Accusation,
    Accusations,
    AggregateOpened,
    BroadcastMessage,
    Case,
    Commitment,
    EvidenceOpened,
    FalseGradient,
    FalseProjection,
    Item,
    Measurements,
    PartsOpened,
    Projections,
    Receipt,
    Reveal,
    RobustRound,
)
from swarm_training.robust.phases import Spoken

_DIGEST_BYTES = 32
_LONGEST = 1e6  # the largest projection, in units of tau: larger ones, or NaN, could break the sum


@dataclass
class AttemptState:
    """A peer's knowledge of one attempt, which grows with every phase.

    Attributes:
        round: the round of this attempt; ``last``: the last step that counted.
        validators: the audits of this step: the target of each validator.
        parts: digests of the parts that have arrived for this peer, by worker; aggregates: digests by owner.
        commitments: digests of parts, by worker; seed_hashes: by owner; committed_aggregates: digests by owner.
        demanded: items that must be opened in this phase, by worker.
        projections: the published projections, by worker.
        cases: each case with its accuser and accusation; None for a case that follows from what all have seen.
        passed: targets of audits that nobody has accused.
    """

    round: RobustRound
    last: StepRecord | None
    validators: Mapping[str, str]
    parts: dict[str, bytes] = field(default_factory=dict)
    aggregates: dict[str, bytes] = field(default_factory=dict)
    commitments: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    seed_hashes: Mapping[str, bytes] = field(default_factory=dict)
    committed_aggregates: Mapping[str, bytes] = field(default_factory=dict)
    demanded: Mapping[str, tuple[Item, ...]] = field(default_factory=dict)
    projections: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    cases: dict[Case, tuple[str, Accusation] | None] = field(default_factory=dict)
    passed: tuple[str, ...] = ()

    def take_commitments(self, spoken: Spoken) -> None:
        """Take the owners' commitments. Owners that validate nothing are the workers of the round."""
        workers = tuple(name for name in self.round.owners if name not in self.validators)
        self.commitments = {name: message.parts for name, message in spoken.items() if message.parts}
        self.seed_hashes = {name: message.seed_hash for name, message in spoken.items()}
        tau = statistics.median(spoken[name].distance for name in workers)
        self.round = replace(self.round, workers=workers, tau=tau)

    def demand(self, items: Mapping[str, Iterable[Item]]) -> None:
        """Set the items that workers must open in this phase."""
        self.demanded = {worker: tuple(each) for worker, each in items.items()}

    def take_aggregates(self, spoken: Spoken) -> None:
        self.committed_aggregates = {name: message.digest for name, message in spoken.items()}

    def take_seed(self, seed: bytes) -> None:
        self.round = replace(self.round, seed=seed)

    def take_projections(self, spoken: Spoken) -> None:
        self.projections = {name: message.values for name, message in spoken.items()}

    def take_accusations(self, spoken: Spoken) -> None:
        """Open a case for each accusation. Targets of audits that nobody has accused have passed."""
        for name, message in spoken.items():
            for accusation in message.items:
                self.cases.setdefault(accusation.case, (name, accusation))
        accused = {case.worker for case in self.cases if isinstance(case, FalseGradient)}
        audits = self.validators.items()
        self.passed = tuple(target for name, target in audits if name in spoken and target not in accused)

    def drop_cases_without_evidence(self, spoken: Collection[str]) -> None:
        """Drop the cases for which a worker has not opened its parts. ``spoken``: the workers that have."""

        def is_shown(case: Case) -> bool:
            return all(item.worker in spoken for item in evidence(case, self.round, self.last))

        self.cases = {case: accuser for case, accuser in self.cases.items() if is_shown(case)}

    def digest(self, item: Item) -> bytes:
        """Return the digest that the item's worker has committed to."""
        if item.step == self.round.step:
            return self.commitments[item.worker][self.round.owners.index(item.owner)]
        assert self.last is not None
        return self.last.commitments[item.worker][self.last.round.owners.index(item.owner)]

    def is_valid(self, message: BroadcastMessage) -> bool:
        """Return whether a message is well formed and fits the commitments. Later checks find false claims in it."""
        owners, name = self.round.owners, message.sender
        match message:
            case Commitment():
                return self._is_commitment(message)
            case Receipt():
                return set(message.missing) <= set(self.round.workers)
            case PartsOpened() | EvidenceOpened():
                items = self.demanded[name]
                return message.items == items and message.digests == tuple(map(self.digest, items))
            case Reveal():
                is_share = hashlib.sha256(message.seed).digest() == self.seed_hashes[name]
                return is_share and set(message.missing) <= set(owners)
            case AggregateOpened():
                return message.digest == self.committed_aggregates[name]
            case Projections():
                are_possible = all(abs(value) <= _LONGEST * self.round.tau for value in message.values)
                return len(message.values) == len(owners) and are_possible
            case Accusations():
                return all(self._may_accuse(name, accusation) for accusation in message.items)
            case Measurements():
                return self._are_measurements(message)
        return True

    def _is_commitment(self, message: Commitment) -> bool:
        owners, name = self.round.owners, message.sender
        num_parts = 0 if name in self.validators else len(owners)
        num_bytes = _DIGEST_BYTES if name in owners else 0
        is_distance = math.isfinite(message.distance) and message.distance > 0
        return len(message.parts) == num_parts and len(message.seed_hash) == num_bytes and is_distance

    def _are_measurements(self, message: Measurements) -> bool:
        shape = [len(suspects(case, self.round, self.last)) for case in self.cases]
        is_measured = all(0 <= value < math.inf for values in message.values for value in values)
        return [len(values) for values in message.values] == shape and is_measured

    def _may_accuse(self, name: str, accusation: Accusation) -> bool:
        """Return whether the accuser is the owner of the projected part, or the validator of the accused worker."""
        measured = accusation.measured
        is_wrong = measured is not None and 1 < measured < math.inf
        match accusation.case:
            case FalseProjection(worker, owner):
                return owner == name and worker in self.round.workers and is_wrong
            case FalseGradient(worker):
                return self.validators.get(name) == worker and (measured is None or is_wrong)
        return False
