"""The computations of a BTARD peer, which carries out the machine's instructions with tensors.

Projections are on random directions whose elements are ±1/√n. Nobody knew their seed when the aggregator committed to
its aggregate v. If v is not the point at which Σ clip(g_i − v) = 0, the projections add up to 0 only by accident.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from swarm_training.robust.centered_clip import centered_clip, clip
from swarm_training.robust.instructions import (
    Aggregate,
    Broadcast,
    CheckProjections,
    Compute,
    Finish,
    Instruction,
    Measure,
    OpenAggregate,
    OpenParts,
    Project,
    SendAggregate,
    SendGradient,
    SendParts,
    StepRecord,
)
from swarm_training.robust.jury import evidence
from swarm_training.robust.messages import (
    AggregateArrived,
    Aggregated,
    AggregateOpened,
    BroadcastMessage,
    Case,
    Checked,
    Computed,
    Event,
    EvidenceOpened,
    FalseAggregate,
    FalseGradient,
    FalseProjection,
    Item,
    MeasuredCases,
    PartArrived,
    PartsOpened,
    Projected,
    Received,
    RobustRound,
)
from swarm_training.robust.roster import Rules, part_sizes, part_tau, projection_limit

_LEAST_DISTANCE = 1e-3  # the least distance, relative to the gradient's norm: float32 must resolve tolerances of tau
_MOST = 1e6  # the largest measurement, in units of the tolerance
_FLAGGED = 4.0  # an aggregate is false if its error is above a quarter of what would be noticed on average

Place = tuple[int, int]  # step and attempt


@dataclass(frozen=True)
class Delivery:
    """A message and data on their way to the peer ``to`` or, if that is None, to all peers including the sender."""

    sender: str
    place: Place
    to: str | None = None
    message: BroadcastMessage | None = None
    parts: Mapping[Item, Tensor] = field(default_factory=dict)
    aggregate: Tensor | None = None


def digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).digest()


class Workbench:
    """The tensors of this step and the last one. ``result``: [n] float32, the gradient of the last finished step."""

    def __init__(self, me: str, num_elements: int, gradient_of: Callable[[str, int], Tensor], rules: Rules) -> None:
        """Create the workbench of peer ``me``. ``gradient_of``: (peer, step) → [num_elements] float32, from the batch
        that follows from both; it is called for this step and the last one."""
        self.me = me
        self.rules = rules
        self.result = torch.zeros(num_elements)
        self._num_elements = num_elements
        self._gradient_of = gradient_of
        self._own: dict[int, Tensor] = {}
        self._owners: dict[Place, tuple[str, ...]] = {}
        self._parts: dict[Item, Tensor] = {}  # as received, not yet compared with the commitments
        self._aggregates: dict[Place, dict[str, Tensor]] = {}

    def load(self, result: Tensor) -> None:
        """Take over the gradient of the last finished step from other peers."""
        self.result = result

    def carry_out(self, instruction: Instruction) -> list[Event | Delivery]:
        """Carry out an instruction. Return the events that follow from it, and the deliveries to send."""
        match instruction:
            case Broadcast(message):
                return [Delivery(self.me, (message.step, message.attempt), message=message)]
            case Compute(current, contributes):
                return [self._compute(current, contributes)]
            case SendGradient(to, items):
                return [Delivery(self.me, _place(items[0]), to, parts={item: self.part(item) for item in items})]
            case SendParts(current):
                own_items = [Item(*_place(current), self.me, owner) for owner in current.owners]
                sent = [(item.owner, {item: self.part(item)}) for item in own_items]
                return [Delivery(self.me, _place(current), owner, parts=parts) for owner, parts in sent]
            case Aggregate(current):
                own = self.aggregate(current)
                self._aggregates.setdefault(_place(current), {})[self.me] = own
                return [Aggregated(current, digest(own))]
            case SendAggregate(current):
                own = self._aggregates[_place(current)][self.me]
                return [Delivery(self.me, _place(current), aggregate=own)]
            case OpenParts(current, items, is_evidence):
                kind = EvidenceOpened if is_evidence else PartsOpened
                parts = {item: self.part(item) for item in items}
                message = kind(self.me, *_place(current), items, ())
                return [Delivery(self.me, _place(current), message=message, parts=parts)]
            case OpenAggregate(current):
                own = self._aggregates[_place(current)][self.me]
                message = AggregateOpened(self.me, *_place(current), digest(own))
                return [Delivery(self.me, _place(current), message=message, aggregate=own)]
            case Project(current):
                return [Projected(current, self.projections(current))]
            case CheckProjections():
                return [Checked(instruction.round, tuple(self.check(instruction)))]
            case Measure(current, said, last, cases):
                return [MeasuredCases(current, tuple(tuple(self.measure(case, current, said, last)) for case in cases))]
            case Finish(current):
                self._finish(current)
        return []

    def receive(self, delivery: Delivery) -> list[Event]:
        """Store a delivery. Return its events, with digests of the data that has arrived, whatever the sender says."""
        events: list[Event] = []
        for item, part in delivery.parts.items():
            if item.worker == delivery.sender:
                self._parts[item] = part
                if item.owner == self.me:
                    events.append(PartArrived(item, digest(part)))
        if delivery.aggregate is not None:
            self._aggregates.setdefault(delivery.place, {})[delivery.sender] = delivery.aggregate
            events.append(AggregateArrived(*delivery.place, delivery.sender, digest(delivery.aggregate)))
        message = delivery.message
        if isinstance(message, PartsOpened | EvidenceOpened):
            message = replace(message, digests=tuple(digest(part) for part in delivery.parts.values()))
        elif isinstance(message, AggregateOpened) and delivery.aggregate is not None:
            message = replace(message, digest=digest(delivery.aggregate))
        return events if message is None else [*events, Received(message)]

    # ---------------------------------------------------------------- what an honest peer computes

    def gradient(self, step: int) -> Tensor:
        """Return the gradient that this peer contributes, [num_elements]."""
        return self._gradient_of(self.me, step)

    def part(self, item: Item) -> Tensor:
        """Return one part of this peer's gradient."""
        owners = self._owners[_place(item)]
        return self._own[item.step].tensor_split(len(owners))[owners.index(item.owner)]

    def aggregate(self, current: RobustRound) -> Tensor:
        """Return the aggregate of the part that this peer owns, float32."""
        parts = torch.stack([self._parts[Item(*_place(current), worker, self.me)] for worker in current.workers])
        return centered_clip(parts, torch.ones(len(parts)), self._tau(current, self.me))

    def projections(self, current: RobustRound) -> tuple[float, ...]:
        """Return the projections of this peer's parts, one for each owner."""
        return tuple(
            self._projection(current, owner, self.part(Item(*_place(current), self.me, owner)))
            for owner in current.owners
        )

    def check(self, instruction: CheckProjections) -> list[tuple[Case, float | None]]:
        """Measure all projections on this peer's part, and the audited target's gradient; None: it was not shown."""
        cases: list[Case] = [FalseProjection(worker, self.me) for worker in instruction.round.workers]
        measured: list[tuple[Case, float | None]] = [
            (case, self.measure(case, instruction.round, instruction.projections, instruction.last)[0])
            for case in cases
        ]
        if instruction.target is not None and instruction.last is not None:
            case = FalseGradient(instruction.target)
            last = instruction.last
            items = evidence(case, instruction.round, last)
            committed = last.commitments[case.worker]
            is_shown = all(
                item in self._parts and digest(self._parts[item]) == expected
                for item, expected in zip(items, committed, strict=True)
            )
            measured.append((case, self._gradient_errors(case.worker, last)[0] if is_shown else None))
        return measured

    def measure(
        self, case: Case, current: RobustRound, said: Mapping[str, Sequence[float]], last: StepRecord | None
    ) -> list[float]:
        """Return how far each suspect is off, in units of the tolerance."""
        match case:
            case FalseProjection(worker, owner):
                return [self._projection_error(current, said, worker, owner)]
            case FalseAggregate(owner):
                parts = [self._parts[Item(*_place(current), worker, owner)] for worker in current.workers]
                tau = self._tau(current, owner)
                true = centered_clip(torch.stack(parts), torch.ones(len(parts)), tau)
                error = float((true.double() - self._aggregates[_place(current)][owner].double()).norm())
                limit = tau * self.rules.projection_tolerance / _FLAGGED
                errors = [self._projection_error(current, said, worker, owner) for worker in current.workers]
                return [_bounded(error / limit), *errors]
            case FalseGradient(worker):
                assert last is not None
                return self._gradient_errors(worker, last)

    # ---------------------------------------------------------------- helpers of these computations

    def _compute(self, current: RobustRound, contributes: bool) -> Computed:
        self._owners[_place(current)] = current.owners
        if not contributes:
            return Computed(current, (), 1.0)
        if current.step not in self._own:
            self._own[current.step] = self.gradient(current.step).detach().cpu().float()
        own = self._own[current.step]
        distance = max(float((own - self.result).norm()), _LEAST_DISTANCE * float(own.norm()))
        return Computed(current, tuple(digest(part) for part in own.tensor_split(len(current.owners))), distance)

    def _tau(self, current: RobustRound, owner: str) -> float:
        sizes = part_sizes(self._num_elements, len(current.owners))
        return part_tau(current.tau, sizes[current.owners.index(owner)], self._num_elements)

    def _projection(self, current: RobustRound, owner: str, part: Tensor) -> float:
        aggregate = self._aggregates[_place(current)][owner]
        clipped = clip(part.double() - aggregate.double(), self._tau(current, owner))
        return float(direction(current.seed, owner, len(clipped)) @ clipped)

    def _projection_error(
        self, current: RobustRound, said: Mapping[str, Sequence[float]], worker: str, owner: str
    ) -> float:
        part = self._parts[Item(*_place(current), worker, owner)]
        limit = projection_limit(self.rules, current.tau, len(part), self._num_elements)
        true = self._projection(current, owner, part)
        return _bounded(abs(said[worker][current.owners.index(owner)] - true) / limit)

    def _gradient_errors(self, worker: str, last: StepRecord) -> list[float]:
        """Return the worker's largest error, then its projections' errors by owner if it had to publish them."""
        items = evidence(FalseGradient(worker), last.round, last)
        sent = torch.cat([self._parts[item] for item in items]).double()
        true = self._gradient_of(worker, last.round.step).detach().cpu().double()
        allowed = self.rules.gradient_tolerance * float(true.norm())
        difference = float((true - sent).norm())
        error = 0.0 if difference == 0 else _bounded(difference / allowed if allowed else math.inf)
        if worker not in last.round.workers:
            return [error]
        said = last.projections
        projected = [self._projection_error(last.round, said, worker, owner) for owner in last.round.owners]
        return [max(error, *projected), *projected]

    def _finish(self, current: RobustRound) -> None:
        aggregates = self._aggregates[_place(current)]
        self.result = torch.cat([aggregates[owner] for owner in current.owners])
        place = _place(current)
        self._owners = {place: current.owners}
        self._own = {step: own for step, own in self._own.items() if step == current.step}
        self._parts = {item: part for item, part in self._parts.items() if _place(item) == place}
        self._aggregates = {place: aggregates}


def direction(seed: bytes, owner: str, size: int) -> Tensor:
    """Return random signs as a float64 [size] of length 1: normal numbers would not have the same bits everywhere."""
    number = int.from_bytes(hashlib.sha256(seed + owner.encode()).digest()[:7], "little")
    signs = torch.randint(2, (size,), generator=torch.Generator().manual_seed(number))
    return (2.0 * signs.double() - 1) / math.sqrt(size)


def _place(of: RobustRound | Item) -> Place:
    return of.step, of.attempt


def _bounded(value: float) -> float:
    """Limit a measurement to ``_MOST``, which also stands for values that are not finite."""
    return min(value, _MOST) if math.isfinite(value) else _MOST
