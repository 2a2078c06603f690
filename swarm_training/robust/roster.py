"""The members of a run by BTARD: how much each is trusted, and which peer audits which. No I/O."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rules:
    """The protocol's settings, on which all peers of a run must agree.

    Attributes:
        audit_share: the share of full members that check another peer's gradient in a step instead of computing one.
        audits_to_join: the audits that a newcomer passes before its gradients count and it aggregates, audits, judges.
        max_absences: the steps in a row that a peer may miss; after more of them it must join again.
        max_unfounded: the complaints about missing audit data that a peer may make and that are then answered.
        gradient_tolerance: a relative error; other hardware and other batches change about 1e-7 of a gradient.
        projection_tolerance: the tolerated error, relative to a part's tau divided by the root of the part's size.
        dissent: the distance by which a juror may differ from the median: in units of the tolerance, or of the median
            if that is larger.
    """

    audit_share: float = 0.2
    audits_to_join: int = 2
    max_absences: int = 2
    max_unfounded: int = 1
    gradient_tolerance: float = 1e-2
    projection_tolerance: float = 1e-3
    dissent: float = 0.1


@dataclass(frozen=True)
class MemberRecord:
    """The standing of one peer. ``absences``: the steps that it has missed in a row."""

    audits_passed: int
    absences: int = 0
    unfounded: int = 0


def part_sizes(num_elements: int, num_parts: int) -> list[int]:
    """Return the sizes of a gradient's parts, as ``torch.tensor_split`` makes them."""
    return [num_elements // num_parts + (part < num_elements % num_parts) for part in range(num_parts)]


def part_tau(tau: float, size: int, num_elements: int) -> float:
    """Return the tau of a part whose share of squared distances is as large as its share of elements."""
    return tau * math.sqrt(size / num_elements)


def projection_limit(rules: Rules, tau: float, size: int, num_elements: int) -> float:
    """Return by how much one projection of a part of ``size`` elements may be wrong."""
    return rules.projection_tolerance * part_tau(tau, size, num_elements) / math.sqrt(size)


class MemberRoster:
    """The registry of members and newcomers. Every honest peer has the same one."""

    def __init__(self, founders: Iterable[str], rules: Rules) -> None:
        self.rules = rules
        self.standings = {name: MemberRecord(rules.audits_to_join) for name in founders}

    @property
    def full(self) -> tuple[str, ...]:
        """Return the peers whose gradients count, sorted."""
        return tuple(name for name in self.all if self.standings[name].audits_passed >= self.rules.audits_to_join)

    @property
    def newcomers(self) -> tuple[str, ...]:
        return tuple(name for name in self.all if self.standings[name].audits_passed < self.rules.audits_to_join)

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(sorted(self.standings))

    def load(self, standings: Mapping[str, MemberRecord]) -> None:
        self.standings = dict(standings)

    def add(self, names: Iterable[str]) -> None:
        self.standings |= {name: MemberRecord(0) for name in names if name not in self.standings}

    def remove(self, name: str) -> None:
        self.standings.pop(name, None)

    def attended(self, name: str) -> None:
        self.standings[name] = replace(self.standings[name], absences=0)

    def missed(self, name: str) -> bool:
        """Count an absence. Return whether the peer has now missed too many steps in a row."""
        standing = self.standings[name]
        self.standings[name] = replace(standing, absences=standing.absences + 1)
        return standing.absences + 1 > self.rules.max_absences

    def complained(self, name: str) -> bool:
        """Count an unfounded complaint. Return whether the peer has now made too many."""
        standing = self.standings[name]
        self.standings[name] = replace(standing, unfounded=standing.unfounded + 1)
        return standing.unfounded + 1 > self.rules.max_unfounded

    def passed_audit(self, name: str) -> None:
        if name in self.standings:
            standing = self.standings[name]
            self.standings[name] = replace(standing, audits_passed=standing.audits_passed + 1)

    def audits(self, seed: bytes, contributors: Iterable[str]) -> dict[str, str]:
        """Draw the audits of a finished step: validators among the full members, and the peer that each recomputes."""
        full = self.full
        number = min(max(1, round(self.rules.audit_share * len(full))), len(full) // 2)
        validators = _shuffled(full, seed + b"validators")[:number]
        targets = _shuffled(set(contributors).intersection(self.all).difference(validators), seed + b"targets")
        return dict(zip(validators, targets, strict=False))


def _shuffled(names: Iterable[str], seed: bytes) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(seed + name.encode()).digest())
