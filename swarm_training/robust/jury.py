"""Which evidence a case needs, and who is guilty by a jury's measurements. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm_training.robust.instructions import Finished
from swarm_training.robust.messages import Accusation, Case, FalseAggregate, FalseGradient, FalseProjection, Item, Round
from swarm_training.robust.roster import Rules

_NEGLIGENCE = 2.0  # an owner that has let a projection pass which was off by no more than this may have measured less


@dataclass(frozen=True)
class Verdict:
    """``banned``: names and reasons; ``unfounded``: who complained of not being shown what everybody was shown then."""

    banned: Mapping[str, str]
    unfounded: tuple[str, ...]


def evidence(case: Case, current: Round, last: Finished | None) -> list[Item]:
    """The parts that a jury needs; their workers must open them."""
    match case:
        case FalseProjection(worker, owner):
            return [Item(current.step, current.attempt, worker, owner)]
        case FalseAggregate(owner):
            return [Item(current.step, current.attempt, worker, owner) for worker in current.workers]
        case FalseGradient(worker):
            assert last is not None
            past = last.round
            return [Item(past.step, past.attempt, worker, owner) for owner in past.owners]


def suspects(case: Case, current: Round, last: Finished | None) -> list[str]:
    """The accused first.

    If projections do not add up, their workers may have lied as well as the owner. If a worker's projection was false
    and its owner did not say so, the two were in it together.
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
) -> Verdict:
    """By the median of the jurors, most of whom are honest: those of them who differ from it have lied, as has an
    accuser who said to have measured something else.

    Args:
        cases: with their suspects; measurements: by juror, in the same order.
        accusations: with their senders; a case that follows from what everybody has seen has none.
    """
    banned: dict[str, str] = {}
    unfounded = []
    for number, (case, accused) in enumerate(cases):
        medians = []
        for position, name in enumerate(accused):
            said = {juror: values[number][position] for juror, values in measurements.items()}
            median = statistics.median_low(said.values())
            medians.append(median)
            limit = _NEGLIGENCE if position and isinstance(case, FalseGradient) else 1.0
            if median > limit:
                banned.setdefault(name, _REASONS[type(case)][bool(position)])
            for juror, value in said.items():
                if _differs(value, median, rules):
                    banned.setdefault(juror, "false testimony")
        if case in accusations:
            accuser, accusation = accusations[case]
            if accusation.measured is None and medians[0] <= 1:
                unfounded.append(accuser)
            elif accusation.measured is not None and _differs(accusation.measured, medians[0], rules):
                banned.setdefault(accuser, "slander")
    return Verdict(banned, tuple(unfounded))


_REASONS: dict[type[Case], tuple[str, str]] = {  # of the accused, and of the other suspects
    FalseProjection: ("false projection", ""),
    FalseAggregate: ("false aggregate", "false projection"),
    FalseGradient: ("false gradient", "let a false projection pass"),
}


def _differs(value: float, median: float, rules: Rules) -> bool:
    return abs(value - median) > rules.dissent * max(1.0, median)
