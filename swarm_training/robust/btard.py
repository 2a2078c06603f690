"""One peer's state machine of BTARD, without tensors, sockets or clocks (Gorbunov et al., 2021, Algorithms 1 to 6).
BTARD finds cheating gradients and cheating aggregators by checks that every peer makes.

``handle(event)`` returns the instructions that follow from an event. A step is a sequence of phases. Each phase waits
for one kind of broadcast from certain peers, and closes when all have come or at the deadline::

    Commitment ─► Receipt ─► (PartsOpened) ─► AggregateCommitted ─► Reveal ─► (AggregateOpened) ─► Projections
               ─► Accusations ─► (EvidenceOpened ─► Measurements) ─► Finish

A missing or malformed broadcast counts as silence. A peer that is silent after its commitment is removed, and may come
back as a newcomer. A peer that a jury finds lying is banned. A step counts only if no peer was removed in it. Otherwise
it is repeated without the removed peers, with new parts and a new seed: withholding a share of the seed gains nothing.

The protocol assumes that signed broadcasts reach all honest peers before the same deadline. Honest peers must be a
majority of the full members, and of the measurements on any case. Batches must follow from (peer, step), so that any
peer can recompute the gradients of this step and of the last one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swarm_training.robust import instructions as todo
from swarm_training.robust import messages as msg
from swarm_training.robust.attempt import AttemptState
from swarm_training.robust.instructions import Instruction, StepRecord
from swarm_training.robust.jury import evidence, judge, suspects
from swarm_training.robust.messages import BroadcastMessage, Event, Item, RobustRound
from swarm_training.robust.phases import PhaseMachine, Spoken
from swarm_training.robust.roster import MemberRecord, MemberRoster, Rules, part_sizes, projection_limit


@dataclass(frozen=True)
class BtardSnapshot:
    """The state that a newcomer loads: standings, and the data of the next audits. All honest peers have the same."""

    standings: Mapping[str, MemberRecord]
    last: StepRecord | None
    audits: Mapping[str, str]
    removed: Mapping[str, todo.Remove]


class Btard(PhaseMachine):
    """One peer's state machine of a run by BTARD."""

    def __init__(self, me: str, founders: Iterable[str], num_elements: int, rules: Rules | None = None) -> None:
        """Create the machine of peer ``me``. ``num_elements``: the size of the gradient, at least one for each peer."""
        super().__init__()
        self.me = me
        self.rules = rules or Rules()
        self.roster = MemberRoster(founders, self.rules)
        self.num_elements = num_elements
        self.removed: dict[str, todo.Remove] = {}
        self._last: StepRecord | None = None
        self._audits: dict[str, str] = {}  # targets by validator: audits of the last step
        self._absent: set[str] = set()  # peers that sent no commitment in this step
        self._known = AttemptState(RobustRound(-1, 0, ()), None, {})
        self._gone: set[str] = set()  # peers removed in this attempt
        self._early: list[Event] = []  # events of rounds that have not begun here
        self._secret = b""

    def handle(self, event: Event) -> list[Instruction]:
        """Return the instructions that follow now. Events of the next attempt or step wait until it begins."""
        self._out = []
        self._take(event)
        return self._out

    def snapshot(self) -> BtardSnapshot:
        """Return the state that a newcomer loads, between two steps."""
        return BtardSnapshot(dict(self.roster.standings), self._last, dict(self._audits), dict(self.removed))

    def load(self, snapshot: BtardSnapshot) -> None:
        """Load a snapshot. The caller must know that honest peers agree on it."""
        self.roster.load(snapshot.standings)
        self._last = snapshot.last
        self._audits, self.removed = dict(snapshot.audits), dict(snapshot.removed)

    @property
    def known(self) -> AttemptState:
        """Return what this peer knows of the present attempt."""
        return self._known

    # ---------------------------------------------------------------- events

    def _take(self, event: Event) -> None:
        if isinstance(event, msg.Begin):
            self._begin(event)
        elif isinstance(event, msg.Late):
            self._become_late()
        elif isinstance(event, msg.Deadline):
            self._close()
        elif msg.place(event) == (self._round.step, self._round.attempt):
            if self.me not in self.removed:
                self._take_of_this_round(event)
        elif msg.place(event) in ((self._round.step, self._round.attempt + 1), (self._round.step + 1, 0)):
            self._early.append(event)  # nobody can be further ahead without this peer

    def _take_of_this_round(self, event: Event) -> None:
        match event:
            case msg.Received(message):
                self._hear(message)
            case msg.Computed():
                seed_hash = hashlib.sha256(self._seed_share).digest() if self.me in self._round.owners else b""
                self._say(msg.Commitment(*self._stamp, seed_hash, event.distance, event.parts))
            case msg.PartArrived(item, digest):
                self._known.parts[item.worker] = digest
                self._answer_if_complete()
            case msg.Aggregated():
                self._say(msg.AggregateCommitted(*self._stamp, event.digest))
            case msg.AggregateArrived():
                self._known.aggregates[event.owner] = event.digest
                self._answer_if_complete()
            case msg.Projected():
                self._say(msg.Projections(*self._stamp, event.values))
            case msg.Checked():
                wrong = [msg.Accusation(case, value) for case, value in event.measured if value is None or value > 1]
                self._say(msg.Accusations(*self._stamp, tuple(wrong)))
            case msg.MeasuredCases():
                self._say(msg.Measurements(*self._stamp, event.values))

    def _begin(self, event: msg.Begin) -> None:
        self.roster.add(name for name in event.joined if not self._is_banned(name))
        for name in event.joined:
            if not self._is_banned(name):
                self.removed.pop(name, None)
        self._secret, self._absent = event.secret, set()
        for validator, target in self._audits.items():
            if self.me == target and self._last is not None:
                items = evidence(msg.FalseGradient(target), self._round, self._last)
                self._do(todo.SendGradient(validator, tuple(items)))
        self._attempt(event.step, 0)

    def _attempt(self, step: int, attempt: int) -> None:
        owners = tuple(name for name in self.roster.full if name not in self._absent)
        validators = {name: target for name, target in self._audits.items() if name in owners}
        if len(validators) == len(owners):
            validators = {}
        validators = {name: target for name, target in validators.items() if target in self.roster.all}
        self._known = AttemptState(RobustRound(step, attempt, owners), self._last, validators)
        self._gone = set()
        self._forget()
        if self.me not in self.roster.all or not owners:
            return
        if self.me not in self._absent:
            self._do(todo.Compute(self._round, contributes=self.me not in validators))
        self._enter(msg.Commitment, [name for name in self.roster.all if name not in self._absent])
        early, self._early = self._early, []
        for event in early:
            self._take(event)

    @property
    def _round(self) -> RobustRound:
        return self._known.round

    @property
    def _seed_share(self) -> bytes:
        return hashlib.sha256(self._secret + self._round.attempt.to_bytes(4, "little")).digest()

    # ---------------------------------------------------------------- phases

    @property
    def _stamp(self) -> tuple[str, int, int]:
        return self.me, self._round.step, self._round.attempt

    def _is_valid(self, message: BroadcastMessage) -> bool:
        return self._known.is_valid(message)

    def _follow(self, phase: type[BroadcastMessage], spoken: Spoken, silent: list[str]) -> None:
        if phase is msg.Commitment:
            self._after_commitments(spoken, silent)
            return
        for name in silent:
            is_liar = name in self._equivocators
            self._remove(name, "equivocation" if is_liar else f"no valid {phase.__name__}", is_liar)
        if self._gone and phase not in (msg.Accusations, msg.EvidenceOpened, msg.Measurements):
            self._repeat()
            return
        follow: dict[type[BroadcastMessage], Callable[[Spoken], None]] = {
            msg.Receipt: self._after_receipts,
            msg.PartsOpened: self._aggregate,
            msg.AggregateCommitted: self._after_aggregates,
            msg.Reveal: self._after_reveals,
            msg.AggregateOpened: self._project,
            msg.Projections: self._after_projections,
            msg.Accusations: self._after_accusations,
            msg.EvidenceOpened: self._after_evidence,
            msg.Measurements: self._after_measurements,
        }
        follow[phase](spoken)

    def _repeat(self) -> None:
        self._attempt(self._round.step, self._round.attempt + 1)

    def _remove(self, name: str, reason: str, is_banned: bool) -> None:
        if name in self.roster.all:
            self.roster.remove(name)
            self._gone.add(name)
            self.removed[name] = todo.Remove(name, reason, is_banned)
            self._do(self.removed[name])

    def _is_banned(self, name: str) -> bool:
        return name in self.removed and self.removed[name].is_banned

    # ---------------------------------------------------------------- what follows each phase

    def _after_commitments(self, spoken: Spoken, silent: list[str]) -> None:
        targets = set(self._known.validators.values())
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
        self._known.take_commitments(spoken)
        if self.me in self._round.workers:
            self._do(todo.SendParts(self._round))
        self._enter(msg.Receipt, self._round.owners)

    def _answer_if_complete(self) -> None:
        """Broadcast which parts or aggregates are missing, once all have come or the time for them is over."""
        if self.me not in self._round.owners:
            return
        if self._phase is msg.Receipt and (self._is_late or self._known.parts.keys() >= set(self._round.workers)):
            mine = self._round.owners.index(self.me)
            workers = self._round.workers
            missing = [name for name in workers if self._known.parts.get(name) != self._known.commitments[name][mine]]
            self._say(msg.Receipt(*self._stamp, tuple(missing)))
        elif self._phase is msg.Reveal and (self._is_late or self._known.aggregates.keys() >= set(self._round.owners)):
            expected = self._known.committed_aggregates.items()
            wrong = [owner for owner, digest in expected if self._known.aggregates.get(owner) != digest]
            self._say(msg.Reveal(*self._stamp, self._seed_share, tuple(wrong)))

    def _after_receipts(self, spoken: Spoken) -> None:
        step, attempt = self._round.step, self._round.attempt
        lacking = {
            worker: [
                Item(step, attempt, worker, owner) for owner in self._round.owners if worker in spoken[owner].missing
            ]
            for worker in self._round.workers
        }
        self._known.demand({worker: items for worker, items in lacking.items() if items})
        if self._known.demanded:
            self._open(msg.PartsOpened)
        else:
            self._aggregate()

    def _open(self, phase: type[BroadcastMessage]) -> None:
        if self.me in self._known.demanded:
            self._do(todo.OpenParts(self._round, self._known.demanded[self.me], phase is msg.EvidenceOpened))
        self._enter(phase, self._known.demanded)

    def _aggregate(self, _: Spoken | None = None) -> None:
        if self.me in self._round.owners:
            self._do(todo.Aggregate(self._round))
        self._enter(msg.AggregateCommitted, self._round.owners)

    def _after_aggregates(self, spoken: Spoken) -> None:
        self._known.take_aggregates(spoken)
        if self.me in self._round.owners:
            self._do(todo.SendAggregate(self._round))
        self._enter(msg.Reveal, self._round.owners)

    def _after_reveals(self, spoken: Spoken) -> None:
        seed = hashlib.sha256(b"".join(spoken[name].seed for name in self._round.owners)).digest()
        self._known.take_seed(seed)
        lacking = {owner for message in spoken.values() for owner in message.missing}
        if lacking:
            if self.me in lacking:
                self._do(todo.OpenAggregate(self._round))
            self._enter(msg.AggregateOpened, lacking)
        else:
            self._project()

    def _project(self, _: Spoken | None = None) -> None:
        if self.me in self._round.workers:
            self._do(todo.Project(self._round))
        self._enter(msg.Projections, self._round.workers)

    def _after_projections(self, spoken: Spoken) -> None:
        self._known.take_projections(spoken)
        sizes = part_sizes(self.num_elements, len(self._round.owners))
        for part, (owner, size) in enumerate(zip(self._round.owners, sizes, strict=True)):
            total = math.fsum(values[part] for values in self._known.projections.values())
            limit = projection_limit(self.rules, self._round.tau, size, self.num_elements)
            if abs(total) > limit * len(self._known.projections):
                self._known.cases[msg.FalseAggregate(owner)] = None
        if self.me in self._round.owners:
            target = self._known.validators.get(self.me)
            self._do(todo.CheckProjections(self._round, self._known.projections, target, self._last))
        self._enter(msg.Accusations, self._round.owners)

    def _after_accusations(self, spoken: Spoken) -> None:
        for name in sorted(self._equivocators):
            self._remove(name, "equivocation", is_banned=True)
        self._known.take_accusations(spoken)
        if not self._known.cases:
            self._finish()
            return
        wanted: dict[str, dict[Item, None]] = {}
        for case in self._known.cases:
            for item in evidence(case, self._round, self._last):
                wanted.setdefault(item.worker, {})[item] = None
        self._known.demand({name: items for name, items in wanted.items() if name in self.roster.all})
        self._open(msg.EvidenceOpened)

    def _after_evidence(self, spoken: Spoken) -> None:
        self._known.drop_cases_without_evidence(spoken)
        if not self._known.cases:
            self._finish()
            return
        if self.me in self._round.owners:
            self._do(todo.Measure(self._round, self._known.projections, self._last, tuple(self._known.cases)))
        self._enter(msg.Measurements, [name for name in self._round.owners if name in self.roster.all])

    def _after_measurements(self, spoken: Spoken) -> None:
        measurements = {name: message.values for name, message in spoken.items()}
        cases = [(case, suspects(case, self._round, self._last)) for case in self._known.cases]
        accusations = {case: accuser for case, accuser in self._known.cases.items() if accuser is not None}
        verdict = judge(cases, accusations, measurements, self.rules)
        for name, reason in verdict.banned.items():
            self._remove(name, reason, is_banned=True)
        for name in verdict.unfounded if not self._gone else ():  # a repeated step repeats them
            if self.roster.complained(name):
                self._remove(name, "unfounded complaints", is_banned=False)
        self._finish()

    def _finish(self) -> None:
        if self._gone:
            self._repeat()
            return
        for name in self._known.passed:
            self.roster.passed_audit(name)
        self._last = StepRecord(self._round, self._known.commitments, self._known.projections)
        self._audits = self.roster.audits(self._round.seed, self._known.commitments)
        self._do(todo.Finish(self._round))
