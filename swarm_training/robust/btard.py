"""BTARD: cheating gradients and cheating aggregators are found by checks that every peer makes (Gorbunov et al., 2021,
Algorithms 1 to 6). One peer's state machine, without tensors, sockets or clocks.

``handle(event)`` answers what has happened with what is to be done. A step is a sequence of phases, each of which waits for
one kind of broadcast of certain peers, and closes when all have come or at the deadline::

    Commitment ─► Receipt ─► (PartsOpened) ─► AggregateCommitted ─► Reveal ─► (AggregateOpened) ─► Projections
               ─► Accusations ─► (EvidenceOpened ─► Measurements) ─► Finish

What does not come, or is malformed, counts as silence. Whoever is silent once it has committed itself is removed, and may
come back as a newcomer; whoever a jury finds lying is banned. A step counts only if nobody was removed in it: it is repeated
without them, with new parts and a new seed, so that who withholds its share of the seed gains nothing by it.

We take for granted that signed broadcasts reach all honest peers before the same deadline, that those are a majority of the
full members and of the measurements on any case, and that batches follow from (peer, step), so that anybody can recompute
the gradients of this step and of the last one.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swarm_training.robust.instructions import (
    Aggregate,
    Broadcast,
    Check,
    Compute,
    Finish,
    Finished,
    Instruction,
    Measure,
    Open,
    OpenAggregate,
    Project,
    Remove,
    SendAggregate,
    SendGradient,
    SendParts,
)
from swarm_training.robust.jury import evidence, judge, suspects
from swarm_training.robust.messages import (
    Accusation,
    Accusations,
    AggregateArrived,
    AggregateCommitted,
    Aggregated,
    AggregateOpened,
    Begin,
    Case,
    Checked,
    Commitment,
    Computed,
    Deadline,
    Event,
    EvidenceOpened,
    FalseAggregate,
    FalseGradient,
    FalseProjection,
    Item,
    Late,
    Measured,
    Measurements,
    Message,
    PartArrived,
    PartsOpened,
    Projected,
    Projections,
    Receipt,
    Received,
    Reveal,
    Round,
)
from swarm_training.robust.roster import Roster, Rules, Standing, part_sizes, projection_limit

Spoken = Mapping[str, Any]  # messages of the phase that has closed, by sender
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Snapshot:
    """What a newcomer must know: the standings, and what the next audits refer to. The same at all honest peers."""

    standings: Mapping[str, Standing]
    last: Finished | None
    audits: Mapping[str, str]


class Btard:
    """A peer's view of the run."""

    def __init__(self, me: str, founders: Iterable[str], num_elements: int, rules: Rules | None = None) -> None:
        """num_elements: of the gradient, at least one for each peer."""
        self.me = me
        self.rules = rules or Rules()
        self.roster = Roster(founders, self.rules)
        self.num_elements = num_elements
        self.removed: dict[str, Remove] = {}
        self._last: Finished | None = None
        self._audits: dict[str, str] = {}  # by validator, of the last step
        self._absent: set[str] = set()  # in this step
        self._round = Round(-1, 0, ())
        self._phase: type[Message] | None = None
        self._early: list[Event] = []  # of rounds that have not begun here
        self._secret = b""
        self._out: list[Instruction] = []
        self._reset()

    def handle(self, event: Event) -> list[Instruction]:
        """What is to be done now. Events of rounds that are over are ignored, those of later ones wait."""
        self._out = []
        self._take(event)
        return self._out

    def snapshot(self) -> Snapshot:
        """For a newcomer, between two steps."""
        return Snapshot(dict(self.roster.standings), self._last, dict(self._audits))

    def load(self, snapshot: Snapshot) -> None:
        """Of a peer whose snapshot is the majority's."""
        self.roster.standings, self._last = dict(snapshot.standings), snapshot.last
        self._audits = dict(snapshot.audits)

    # ---------------------------------------------------------------- events

    def _take(self, event: Event) -> None:
        if isinstance(event, Begin):
            self._begin(event)
        elif isinstance(event, Late):
            self._is_late = True
            self._answer_if_complete()
        elif isinstance(event, Deadline):
            if self._phase is not None:
                self._close()
        elif (where := _round_number(event)) > (self._round.step, self._round.attempt):
            self._early.append(event)
        elif where == (self._round.step, self._round.attempt) and self.me not in self.removed:
            self._take_of_this_round(event)

    def _take_of_this_round(self, event: Event) -> None:
        match event:
            case Received(message):
                self._hear(message)
            case Computed():
                seed_hash = hashlib.sha256(self._seed_share).digest() if self.me in self._round.owners else b""
                self._say(Commitment(*self._stamp, seed_hash, event.distance, event.parts))
            case PartArrived(item, digest):
                self._parts[item.worker] = digest
                self._answer_if_complete()
            case Aggregated():
                self._say(AggregateCommitted(*self._stamp, event.digest))
            case AggregateArrived():
                self._aggregates[event.owner] = event.digest
                self._answer_if_complete()
            case Projected():
                self._say(Projections(*self._stamp, event.values))
            case Checked():
                wrong = [Accusation(case, value) for case, value in event.measured if value is None or value > 1]
                self._say(Accusations(*self._stamp, tuple(wrong)))
            case Measured():
                self._say(Measurements(*self._stamp, event.values))

    def _begin(self, event: Begin) -> None:
        self.roster.add(name for name in event.joined if not self._is_banned(name))
        for name in event.joined:
            if not self._is_banned(name):
                self.removed.pop(name, None)
        self._secret, self._absent = event.secret, set()
        for validator, target in self._audits.items():
            if self.me == target and self._last is not None:
                items = evidence(FalseGradient(target), self._round, self._last)
                self._do(SendGradient(validator, tuple(items)))
        self._attempt(event.step, 0)

    def _attempt(self, step: int, attempt: int) -> None:
        owners = tuple(name for name in self.roster.full if name not in self._absent)
        self._round = Round(step, attempt, owners)
        self._reset()
        if self.me not in self.roster.all:
            self._phase = None
            return
        if self.me not in self._absent:
            self._do(Compute(self._round, contributes=self.me not in self._validators))
        self._enter(Commitment, [name for name in self.roster.all if name not in self._absent])
        early, self._early = self._early, []
        for event in early:
            self._take(event)

    def _reset(self) -> None:
        """Nothing is known of the round that begins."""
        self._heard: dict[type[Message], dict[str, Message]] = {}
        self._expected: frozenset[str] = frozenset()
        self._is_late = False
        self._answered: set[type[Message]] = set()
        self._passed: list[str] = []
        self._gone: dict[str, Remove] = {}
        self._equivocators: set[str] = set()
        self._parts: dict[str, bytes] = {}  # digests of what has arrived here
        self._aggregates: dict[str, bytes] = {}
        self._commitments: dict[str, tuple[bytes, ...]] = {}
        self._committed_aggregates: dict[str, bytes] = {}
        self._demanded: dict[str, tuple[Item, ...]] = {}
        self._projections: dict[str, tuple[float, ...]] = {}
        self._cases: dict[Case, tuple[str, Accusation] | None] = {}
        validators = {name: target for name, target in self._audits.items() if name in self._round.owners}
        self._validators = validators if len(validators) < len(self._round.owners) else {}
        share = self._secret + self._round.attempt.to_bytes(4, "little")
        self._seed_share = hashlib.sha256(share).digest()

    # ---------------------------------------------------------------- phases

    @property
    def _stamp(self) -> tuple[str, int, int]:
        return self.me, self._round.step, self._round.attempt

    def _do(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    def _say(self, message: Message) -> None:
        if type(message) not in self._answered:
            self._answered.add(type(message))
            self._do(Broadcast(message))

    def _hear(self, message: Message) -> None:
        known = self._heard.setdefault(type(message), {}).setdefault(message.sender, message)
        if known != message:
            self._equivocators.add(message.sender)
        self._close_if_complete()

    def _enter(self, phase: type[Message], expected: Iterable[str]) -> None:
        """Waits for broadcasts of these peers; who has nothing to say is not asked."""
        self._phase, self._expected, self._is_late = phase, frozenset(expected), False
        self._answer_if_complete()
        self._close_if_complete()

    def _close_if_complete(self) -> None:
        if self._phase is not None and self._expected <= self._heard.get(self._phase, {}).keys():
            self._close()

    def _close(self) -> None:
        assert self._phase is not None
        phase, heard = self._phase, self._heard.get(self._phase, {})
        spoken = {name: heard[name] for name in sorted(self._expected) if name in heard and self._is_valid(heard[name])}
        silent = sorted(self._expected - spoken.keys())
        self._phase = None
        if phase is Commitment:
            self._after_commitments(spoken, silent)
            return
        for name in silent:
            self._remove(name, f"no valid {phase.__name__}", is_banned=False)
        if self._gone and phase not in (Accusations, EvidenceOpened, Measurements):
            self._repeat()
        else:
            {
                Receipt: self._after_receipts,
                PartsOpened: self._aggregate,
                AggregateCommitted: self._after_aggregates,
                Reveal: self._after_reveals,
                AggregateOpened: lambda _: self._project(),
                Projections: self._after_projections,
                Accusations: self._after_accusations,
                EvidenceOpened: self._after_evidence,
                Measurements: self._after_measurements,
            }[phase](spoken)

    def _repeat(self) -> None:
        self._attempt(self._round.step, self._round.attempt + 1)

    def _remove(self, name: str, reason: str, is_banned: bool) -> None:
        if name in self.roster.all:
            self.roster.remove(name)
            self.removed[name] = self._gone[name] = Remove(name, reason, is_banned)
            self._do(self.removed[name])

    def _is_banned(self, name: str) -> bool:
        return name in self.removed and self.removed[name].is_banned

    def _is_valid(self, message: Message) -> bool:
        """Whether it says what it is expected to; what is wrong in it otherwise is for others to find."""
        owners, name = self._round.owners, message.sender
        match message:
            case Commitment():
                num_parts = 0 if name in self._validators else len(owners)
                num_bytes = _DIGEST_BYTES if name in owners else 0
                is_distance = math.isfinite(message.distance) and message.distance > 0
                return len(message.parts) == num_parts and len(message.seed_hash) == num_bytes and is_distance
            case Receipt():
                return set(message.missing) <= set(self._round.workers)
            case PartsOpened() | EvidenceOpened():
                items = self._demanded[name]
                return message.items == items and message.digests == tuple(self._digest(item) for item in items)
            case Reveal():
                is_share = hashlib.sha256(message.seed).digest() == self._heard_commitment(name).seed_hash
                return is_share and set(message.missing) <= set(owners)
            case AggregateOpened():
                return message.digest == self._committed_aggregates[name]
            case Projections():
                return len(message.values) == len(owners) and all(map(math.isfinite, message.values))
            case Accusations():
                return all(self._may_accuse(name, accusation) for accusation in message.items)
            case Measurements():
                shape = [len(suspects(case, self._round, self._last)) for case in self._cases]
                numbers = [value for values in message.values for value in values]
                is_measured = all(0 <= value < math.inf for value in numbers)
                return [len(values) for values in message.values] == shape and is_measured
        return True

    def _may_accuse(self, name: str, accusation: Accusation) -> bool:
        match accusation.case:
            case FalseProjection(worker, owner):
                measured = accusation.measured
                return owner == name and worker in self._round.workers and measured is not None and measured > 1
            case FalseGradient(worker):
                is_measured = accusation.measured is None or accusation.measured > 1
                return self._validators.get(name) == worker and worker in self.roster.all and is_measured
        return False

    def _heard_commitment(self, name: str) -> Commitment:
        message = self._heard[Commitment][name]
        assert isinstance(message, Commitment)
        return message

    def _digest(self, item: Item) -> bytes:
        """That was committed."""
        if item.step == self._round.step:
            return self._commitments[item.worker][self._round.owners.index(item.owner)]
        assert self._last is not None
        return self._last.commitments[item.worker][self._last.round.owners.index(item.owner)]

    # ---------------------------------------------------------------- what follows each phase

    def _after_commitments(self, spoken: Spoken, silent: list[str]) -> None:
        targets = set(self._validators.values())
        for name in silent:
            self._absent.add(name)
            if name in targets:
                self._remove(name, "withheld what was to be audited", is_banned=False)
            elif self.roster.missed(name):
                self._remove(name, "absent too often", is_banned=False)
        for name in spoken:
            self.roster.attended(name)
        if set(silent) & set(self._round.owners):
            self._repeat()
            return
        workers = tuple(name for name in self._round.owners if name not in self._validators)
        self._commitments = {name: message.parts for name, message in spoken.items() if message.parts}
        tau = statistics.median(spoken[name].distance for name in workers)
        self._round = replace(self._round, workers=workers, tau=tau)
        if self.me in workers:
            self._do(SendParts(self._round))
        self._enter(Receipt, self._round.owners)

    def _answer_if_complete(self) -> None:
        """Says what has not come, once all has, or when it is late."""
        if self.me not in self._round.owners:
            return
        if self._phase is Receipt and (self._is_late or self._parts.keys() >= set(self._round.workers)):
            mine = self._round.owners.index(self.me)
            workers = self._round.workers
            missing = [name for name in workers if self._parts.get(name) != self._commitments[name][mine]]
            self._say(Receipt(*self._stamp, tuple(missing)))
        elif self._phase is Reveal and (self._is_late or self._aggregates.keys() >= set(self._round.owners)):
            expected = self._committed_aggregates.items()
            wrong = [owner for owner, digest in expected if self._aggregates.get(owner) != digest]
            self._say(Reveal(*self._stamp, self._seed_share, tuple(wrong)))

    def _after_receipts(self, spoken: Spoken) -> None:
        lacking = {
            worker: [owner for owner in self._round.owners if worker in spoken[owner].missing]
            for worker in self._round.workers
        }
        step, attempt = self._round.step, self._round.attempt
        self._demand(
            {
                worker: [Item(step, attempt, worker, owner) for owner in owners]
                for worker, owners in lacking.items()
                if owners
            }
        )
        if self._demanded:
            self._open(PartsOpened)
        else:
            self._aggregate()

    def _demand(self, items: Mapping[str, list[Item]]) -> None:
        self._demanded = {name: tuple(wanted) for name, wanted in items.items()}

    def _open(self, phase: type[Message]) -> None:
        if self.me in self._demanded:
            self._do(Open(self._round, self._demanded[self.me], phase is EvidenceOpened))
        self._enter(phase, self._demanded)

    def _aggregate(self, _: Spoken | None = None) -> None:
        if self.me in self._round.owners:
            self._do(Aggregate(self._round))
        self._enter(AggregateCommitted, self._round.owners)

    def _after_aggregates(self, spoken: Spoken) -> None:
        self._committed_aggregates = {name: message.digest for name, message in spoken.items()}
        if self.me in self._round.owners:
            self._do(SendAggregate(self._round))
        self._enter(Reveal, self._round.owners)

    def _after_reveals(self, spoken: Spoken) -> None:
        seed = hashlib.sha256(b"".join(spoken[name].seed for name in self._round.owners)).digest()
        self._round = replace(self._round, seed=seed)
        lacking = {owner for message in spoken.values() for owner in message.missing}
        if lacking:
            if self.me in lacking:
                self._do(OpenAggregate(self._round))
            self._enter(AggregateOpened, lacking)
        else:
            self._project()

    def _project(self) -> None:
        if self.me in self._round.workers:
            self._do(Project(self._round))
        self._enter(Projections, self._round.workers)

    def _after_projections(self, spoken: Spoken) -> None:
        self._projections = {name: message.values for name, message in spoken.items()}
        sizes = part_sizes(self.num_elements, len(self._round.owners))
        for part, (owner, size) in enumerate(zip(self._round.owners, sizes, strict=True)):
            total = math.fsum(values[part] for values in self._projections.values())
            limit = projection_limit(self.rules, self._round.tau, size, self.num_elements)
            if abs(total) > limit * len(self._projections):
                self._cases[FalseAggregate(owner)] = None
        if self.me in self._round.owners:
            target = self._validators.get(self.me)
            self._do(Check(self._round, self._projections, target if target in self.roster.all else None, self._last))
        self._enter(Accusations, self._round.owners)

    def _after_accusations(self, spoken: Spoken) -> None:
        for name in sorted(self._equivocators):
            self._remove(name, "equivocation", is_banned=True)
        for name, message in spoken.items():
            for accusation in message.items:
                self._cases.setdefault(accusation.case, (name, accusation))
        accused = {case.worker for case in self._cases if isinstance(case, FalseGradient)}
        self._passed = [
            target for name, target in self._validators.items() if name in spoken and target not in accused
        ]
        if not self._cases:
            self._finish()
            return
        wanted: dict[str, dict[Item, None]] = {}
        for case in self._cases:
            for item in evidence(case, self._round, self._last):
                wanted.setdefault(item.worker, {})[item] = None
        self._demand({name: list(items) for name, items in wanted.items() if name in self.roster.all})
        self._open(EvidenceOpened)

    def _after_evidence(self, spoken: Spoken) -> None:
        def is_shown(case: Case) -> bool:
            return all(item.worker in spoken for item in evidence(case, self._round, self._last))

        self._cases = {case: accuser for case, accuser in self._cases.items() if is_shown(case)}
        if not self._cases:
            self._finish()
            return
        if self.me in self._round.owners:
            self._do(Measure(self._round, self._projections, self._last, tuple(self._cases)))
        self._enter(Measurements, [name for name in self._round.owners if name in self.roster.all])

    def _after_measurements(self, spoken: Spoken) -> None:
        measurements = {name: message.values for name, message in spoken.items()}
        cases = [(case, suspects(case, self._round, self._last)) for case in self._cases]
        accusations = {case: accuser for case, accuser in self._cases.items() if accuser is not None}
        verdict = judge(cases, accusations, measurements, self.rules)
        for name, reason in verdict.banned.items():
            self._remove(name, reason, is_banned=True)
        for name in verdict.unfounded:
            if name in self.roster.all and self.roster.complained(name):
                self._remove(name, "unfounded complaints", is_banned=False)
        self._finish()

    def _finish(self) -> None:
        if self._gone:
            self._repeat()
            return
        for name in self._passed:
            self.roster.passed_audit(name)
        self._last = Finished(self._round, self._commitments, self._projections)
        self._audits = self.roster.audits(self._round.seed, self._commitments)
        self._do(Finish(self._round))


def _round_number(event: Event) -> tuple[int, int]:
    match event:
        case Received(message):
            return message.step, message.attempt
        case PartArrived(item):
            return item.step, item.attempt
        case AggregateArrived():
            return event.step, event.attempt
        case Computed() | Aggregated() | Projected() | Checked() | Measured():
            return event.round.step, event.round.attempt
    raise AssertionError(event)
