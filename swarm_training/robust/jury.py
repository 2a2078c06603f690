"""The evidence that a case needs, and the verdict by a jury's measurements. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm_training.robust.instructions import StepRecord
from swarm_training.robust.messages import (
    Accusation,
    Case,
    FalseAggregate,
    FalseGradient,
    FalseProjection,
    Item,
    RobustRound,
)
from swarm_training.robust.roster import Rules

_NEGLIGENCE = 2.0  # an owner may let a projection pass that is off by up to this: it may have measured less


@dataclass(frozen=True)
class JuryVerdict:
    """A jury's verdict. ``banned``: reasons by name; ``unfounded``: accusers whose missing data was then shown."""

    banned: Mapping[str, str]
    unfounded: tuple[str, ...]


def evidence(case: Case, current: RobustRound, last: StepRecord | None) -> list[Item]:
    """Return the parts that a jury needs. Their workers must open them."""
    match case:
        case FalseProjection(worker, owner):
            return [Item(current.step, current.attempt, worker, owner)]
        case FalseAggregate(owner):
            return [Item(current.step, current.attempt, worker, owner) for worker in current.workers]
        case FalseGradient(worker):
            assert last is not None
            past = last.round
            return [Item(past.step, past.attempt, worker, owner) for owner in past.owners]


def suspects(case: Case, current: RobustRound, last: StepRecord | None) -> list[str]:
    """Return the suspects of a case, the accused first.

    If projections do not add up, the owner or any of the workers may have lied. If a worker's projection in the last
    step was false and the owner of that part did not accuse it, the two colluded.
    """
    match case:
        case FalseProjection(worker, _):
            return [worker]
        case FalseAggregate(owner):
            return [owner, *current.workers]
        case FalseGradient(worker):
            assert last is not None
            return [worker, *last.round.owners] if worker in last.round.workers else [worker]


def judge(
    cases: Sequence[tuple[Case, Sequence[str]]],
    accusations: Mapping[Case, tuple[str, Accusation]],
    measurements: Mapping[str, Sequence[Sequence[float]]],
    rules: Rules,
) -> JuryVerdict:
    """Return the verdict by the median of the jurors' measurements: most jurors are honest.

    A juror or an accuser has lied if its measurement differs from the median.

    Args:
        cases: each case with its suspects; measurements: values in the same order, by juror.
        accusations: each with its sender; a case that follows from what all have seen has none.
    """
    banned: dict[str, str] = {}
    unfounded = []
    for number, (case, accused) in enumerate(cases):
        medians = []
        for position, name in enumerate(accused):
            said = {juror: values[number][position] for juror, values in measurements.items()}
            median = statistics.median_low(said.values())
            medians.append(median)
            if median > _limit(case, position):
                banned.setdefault(name, _REASONS[type(case)][bool(position)])
            for juror, value in said.items():
                if _differs(value, median, rules):
                    banned.setdefault(juror, "false testimony")
        if case in accusations:
            accuser, accusation = accusations[case]
            if accusation.measured is None and medians[0] <= 1:
                unfounded.append(accuser)
            elif _is_slander(accusation, medians[0], rules):
                banned.setdefault(accuser, "slander")
    return JuryVerdict(banned, tuple(unfounded))


_REASONS: dict[type[Case], tuple[str, str]] = {  # reasons to ban the accused, and the other suspects
    FalseProjection: ("false projection", ""),
    FalseAggregate: ("false aggregate", "false projection"),
    FalseGradient: ("false gradient", "let a false projection pass"),
}


def _limit(case: Case, position: int) -> float:
    return _NEGLIGENCE if position and isinstance(case, FalseGradient) else 1.0


def _is_slander(accusation: Accusation, median: float, rules: Rules) -> bool:
    return accusation.measured is not None and _differs(accusation.measured, median, rules)


def _differs(value: float, median: float, rules: Rules) -> bool:
    return abs(value - median) > rules.dissent * max(1.0, median)
