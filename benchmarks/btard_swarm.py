"""Peers of BTARD in one process: honest ones, and attackers of many kinds, some of whom help one another."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm_training.robust.btard import Btard
from swarm_training.robust.instructions import CheckProjections, Finish, Instruction, Remove, StepRecord
from swarm_training.robust.messages import (
    AggregateCommitted,
    Begin,
    Case,
    Commitment,
    Deadline,
    Event,
    FalseGradient,
    FalseProjection,
    Item,
    Late,
    Receipt,
    Reveal,
    RobustRound,
)
from swarm_training.robust.roster import Rules
from swarm_training.robust.workbench import Delivery, Workbench

Gradient = Callable[[str, int], Tensor]
DIMENSIONS = 200


class Peer(Workbench):
    """An honest one; attackers override what they lie about. ``friends``: the other attackers."""

    friends: frozenset[str] = frozenset()

    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        """What this peer is sent in place of it; None: nothing."""
        return delivery


class SignFlip(Peer):
    scale = 1.0

    def gradient(self, step: int) -> Tensor:
        return -self.scale * super().gradient(step)


class LargeSignFlip(SignFlip):
    scale = 1000.0


class NotFinite(Peer):
    def gradient(self, step: int) -> Tensor:
        gradient = super().gradient(step).clone()
        gradient[0] = torch.inf
        return gradient


class OpenShift(Peer):
    """Pushes the part that it aggregates against the gradient."""

    def aggregate(self, current: RobustRound) -> Tensor:
        return -super().aggregate(current)


class HiddenShift(OpenShift):
    """The same, covered up by a false projection of its own."""

    def projections(self, current: RobustRound) -> tuple[float, ...]:
        said = list(super().projections(current))
        part = current.owners.index(self.me)
        said[part] -= sum(
            self._projection(current, self.me, self._parts[Item(current.step, current.attempt, worker, self.me)])
            for worker in current.workers
        )
        return tuple(said)

    def check(self, instruction: CheckProjections) -> list[tuple[Case, float | None]]:
        return [(case, value) for case, value in super().check(instruction) if not _is_of(case, self.friends)]


class SharedShift(HiddenShift):
    """The same, covered up by the first of its friends: its own projections are true."""

    accomplices: dict[str, HiddenShift]

    def projections(self, current: RobustRound) -> tuple[float, ...]:
        said = list(Workbench.projections(self, current))
        friends = sorted(self.friends & set(current.workers))
        if friends and friends[0] == self.me:
            for owner in sorted(self.friends & set(current.owners)):
                bench = self.accomplices[owner]
                said[current.owners.index(owner)] -= sum(
                    bench._projection(current, owner, bench._parts[Item(current.step, current.attempt, worker, owner)])
                    for worker in current.workers
                )
        return tuple(said)


class FalseProjections(Peer):
    """Makes honest aggregators look like liars."""

    def projections(self, current: RobustRound) -> tuple[float, ...]:
        return tuple(value + 10 for value in super().projections(current))


class HugeProjections(Peer):
    """Finite, but their sum is not."""

    def projections(self, current: RobustRound) -> tuple[float, ...]:
        return tuple(1e308 for _ in current.owners)


class Slander(Peer):
    """Accuses whomever it can, of projections or of what it audits."""

    def check(self, instruction: CheckProjections) -> list[tuple[Case, float | None]]:
        return [
            (case, value if _is_of(case, self.friends) else 50.0)
            for case, value in super().check(instruction)
            if isinstance(case, FalseGradient) or instruction.round.step % 7 == 3
        ]


class Complaint(Peer):
    """Says that it was not shown what it audits."""

    def check(self, instruction: CheckProjections) -> list[tuple[Case, float | None]]:
        return [
            (case, None if isinstance(case, FalseGradient) else value) for case, value in super().check(instruction)
        ]


class WrongAggregate(Peer):
    """Sends half of the peers another aggregate than it has committed itself to, and opens that one too."""

    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        is_chosen = hashlib.sha256(to.encode()).digest()[0] % 2 == 0
        if delivery.aggregate is not None and (delivery.message is not None or is_chosen) and to != self.me:
            return replace(delivery, aggregate=-delivery.aggregate)
        return delivery


class WrongPart(Peer):
    """Sends other parts than it has committed itself to, and opens those too."""

    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        if to == self.me or not delivery.parts:
            return delivery
        return replace(delivery, parts={item: part + 1 for item, part in delivery.parts.items()})


class Silence(Peer):
    """From its first commitment on: sends no parts."""

    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        return None if delivery.parts else delivery


class NoAggregate(Peer):
    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        return None if isinstance(delivery.message, AggregateCommitted) else delivery


class Absence(Peer):
    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        return None if isinstance(delivery.message, Commitment | Receipt) else delivery


class NoReveal(Peer):
    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        return None if isinstance(delivery.message, Reveal) else delivery


class Equivocation(Peer):
    """Says two things at once: all receive both."""

    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        if isinstance(delivery.message, AggregateCommitted) and to == self.me:
            self.echo = replace(delivery, message=replace(delivery.message, digest=bytes(32)))
        return delivery


class Collusion(SignFlip):
    """Flips signs; its friends find nothing wrong with it as validators and jurors, and accuse the honest together."""

    def check(self, instruction: CheckProjections) -> list[tuple[Case, float | None]]:
        if instruction.round.step % 5:
            return [(case, 0.0) for case, _ in super().check(instruction)]
        return [
            (case, 0.0 if _is_of(case, self.friends) else 30.0)
            for case, _ in super().check(instruction)
            if isinstance(case, FalseGradient)
        ]

    def measure(
        self, case: Case, current: RobustRound, said: Mapping[str, Iterable[float]], last: StepRecord | None
    ) -> list[float]:
        values = super().measure(case, current, said, last)  # type: ignore[arg-type]
        return [0.0 if _is_of(case, self.friends) else 30.0, *values[1:]]


KINDS: dict[str, type[Peer]] = {
    "sign flip": SignFlip,
    "sign flip × 1000": LargeSignFlip,
    "not finite": NotFinite,
    "shift, open": OpenShift,
    "shift, hidden by its own projection": HiddenShift,
    "shift, hidden by an accomplice": SharedShift,
    "false projections": FalseProjections,
    "projections too large to be added": HugeProjections,
    "slander": Slander,
    "complaints without reason": Complaint,
    "another aggregate than committed": WrongAggregate,
    "other parts than committed": WrongPart,
    "silence: no parts": Silence,
    "silence: no aggregate": NoAggregate,
    "silence: absent": Absence,
    "seed not revealed": NoReveal,
    "equivocation": Equivocation,
    "collusion of validators and jury": Collusion,
}


def _is_of(case: Case, names: frozenset[str]) -> bool:
    """Whether one of them is accused."""
    return (case.worker if isinstance(case, FalseGradient | FalseProjection) else case.owner) in names


def noisy_gradients(dimensions: int = DIMENSIONS, seed: int = 0) -> Gradient:
    """A common direction that turns slowly, and noise of each peer's own that is twice as large."""
    base = torch.randn(2, dimensions, generator=torch.Generator().manual_seed(seed))

    def gradient(peer: str, step: int) -> Tensor:
        number = int.from_bytes(hashlib.sha256(f"{seed}|{peer}|{step}".encode()).digest()[:6], "little")
        noise = torch.randn(dimensions, generator=torch.Generator().manual_seed(number))
        return base[0] + base[1] * (step / 50) + 2 * noise

    return gradient


def with_rounding(gradient_of: Gradient, name: str) -> Gradient:
    """As another machine would compute it."""
    noise = torch.Generator().manual_seed(int.from_bytes(name.encode()[-4:], "little"))

    def gradient(peer: str, step: int) -> Tensor:
        true = gradient_of(peer, step)
        return true * (1 + 1e-6 * torch.randn(true.shape, generator=noise))

    return gradient


@dataclass(frozen=True)
class Removed:
    step: int
    reason: str
    is_banned: bool


class Swarm:
    """Runs steps among peers; broadcasts reach all, in an order by chance that is another one for everybody."""

    def __init__(
        self,
        kinds: Mapping[str, type[Peer]],
        gradient_of: Gradient,
        num_elements: int,
        seed: int = 0,
        rules: Rules | None = None,
        start: int = 0,
    ) -> None:
        """kinds: of all peers, by name; attackers are honest before step ``start``."""
        self.rules = rules or Rules()
        self._chance = random.Random(seed)
        self._seed, self._start, self._num_elements = seed, start, num_elements
        self._gradient_of, self._founders = gradient_of, sorted(kinds)
        self.kinds = dict(kinds)
        self.step_number = 0
        self.benches: dict[str, Peer] = {}
        self.machines: dict[str, Btard] = {}
        self._waiting: dict[str, deque[Event | Delivery]] = {}
        self.removed: dict[str, Removed] = {}
        for name in self._founders:
            self._add(name, Peer if start else kinds[name])

    @property
    def attackers(self) -> set[str]:
        return {name for name, kind in self.kinds.items() if kind is not Peer}

    @property
    def living(self) -> list[str]:
        return [name for name in sorted(self.machines) if name not in self.removed]

    @property
    def honest(self) -> list[str]:
        return [name for name in self.living if name not in self.attackers]

    def step(self, joined: Mapping[str, type[Peer]] | None = None) -> Tensor:
        """The step's gradient, as the first honest peer has it."""
        joined = joined or {}
        if self.step_number == self._start:
            for name in self.attackers & self.benches.keys():
                self._become(name, self.kinds[name])
        for name, kind in joined.items():
            snapshot = self.machines[self.honest[0]].snapshot()
            self.kinds[name] = kind
            self.removed.pop(name, None)
            self._add(name, kind)
            self.machines[name].load(snapshot)
            self.benches[name].result = self.benches[self.honest[0]].result
        for name in self.living:
            secret = hashlib.sha256(f"{self._seed}|{name}|{self.step_number}".encode()).digest()
            self._handle(name, Begin(self.step_number, secret, tuple(joined)))
        self._run()
        self.step_number += 1
        return self.benches[self.honest[0]].result

    def _add(self, name: str, kind: type[Peer]) -> None:
        self.machines[name] = Btard(name, self._founders, self._num_elements, self.rules)
        gradient_of = with_rounding(self._gradient_of, name)
        self.benches[name] = kind(name, self._num_elements, gradient_of, self.rules)
        self._waiting[name] = deque()
        self._become(name, kind)

    def _become(self, name: str, kind: type[Peer]) -> None:
        bench = self.benches[name]
        bench.__class__ = kind
        bench.friends = frozenset(self.attackers)
        if isinstance(bench, SharedShift):
            bench.accomplices = self.benches  # type: ignore[assignment]

    def _run(self) -> None:
        """Until all honest peers have finished the step."""
        self.finished: set[str] = set()
        while True:
            while busy := [name for name in self.living if self._waiting[name]]:
                name = self._chance.choice(busy)
                self._take(name, self._waiting[name].popleft())
            if self.finished >= set(self.honest):
                return
            for name in self.living:
                self._handle(name, Late())
            if not any(self._waiting[name] for name in self.living):
                for name in self.living:
                    self._handle(name, Deadline())

    def _take(self, name: str, what: Event | Delivery) -> None:
        if isinstance(what, Delivery):
            for event in self.benches[name].receive(what):
                self._handle(name, event)
        else:
            self._handle(name, what)

    def _handle(self, name: str, event: Event) -> None:
        for instruction in self.machines[name].handle(event):
            self._carry_out(name, instruction)

    def _carry_out(self, name: str, instruction: Instruction) -> None:
        if isinstance(instruction, Remove):
            if name in self.honest or instruction.peer == name:
                found = Removed(self.step_number, instruction.reason, instruction.is_banned)
                known = self.removed.setdefault(instruction.peer, found)
                assert known == found, f"{name} removes {instruction.peer} for {found}, others for {known}"
            return
        if isinstance(instruction, Finish):
            self.finished.add(name)
        for outcome in self.benches[name].carry_out(instruction):
            if isinstance(outcome, Delivery):
                self._deliver(outcome)
            else:
                self._waiting[name].append(outcome)

    def _deliver(self, delivery: Delivery) -> None:
        sender = self.benches[delivery.sender]
        for to in [delivery.to] if delivery.to is not None else list(self.living):
            if to in self.living and (sent := sender.sends(delivery, to)) is not None:
                self._waiting[to].append(sent)
        if isinstance(sender, Equivocation) and (echo := sender.__dict__.pop("echo", None)) is not None:
            for to in self.living:
                self._waiting[to].append(echo)
