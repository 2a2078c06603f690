"""Verdicts by hand: the median decides, and who differs from it has lied."""

from __future__ import annotations

from swarm_training.robust.instructions import StepRecord
from swarm_training.robust.jury import JuryVerdict, evidence, judge, suspects
from swarm_training.robust.messages import Accusation, FalseAggregate, FalseGradient, FalseProjection, Item, RobustRound
from swarm_training.robust.roster import Rules

NOW = RobustRound(7, 1, ("a", "b", "c", "d"), ("a", "b", "c"), 1.0)
LAST = StepRecord(RobustRound(6, 0, ("a", "b", "c", "d"), ("a", "b", "d"), 1.0, b"seed"), {}, {})
RULES = Rules()


def verdict(
    case: FalseProjection | FalseGradient | FalseAggregate,
    measured: dict[str, list[float]],
    accuser: str | None = None,
    said: float | None = None,
) -> JuryVerdict:
    accusations = {case: (accuser, Accusation(case, said))} if accuser else {}
    return judge(
        [(case, suspects(case, NOW, LAST))], accusations, {juror: [values] for juror, values in measured.items()}, RULES
    )


def test_evidence_and_suspects() -> None:
    assert evidence(FalseProjection("a", "d"), NOW, LAST) == [Item(7, 1, "a", "d")]
    assert suspects(FalseProjection("a", "d"), NOW, LAST) == ["a"]
    assert evidence(FalseAggregate("d"), NOW, LAST) == [Item(7, 1, worker, "d") for worker in "abc"]
    assert suspects(FalseAggregate("d"), NOW, LAST) == ["d", "a", "b", "c"]
    assert evidence(FalseGradient("b"), NOW, LAST) == [Item(6, 0, "b", owner) for owner in "abcd"]
    assert suspects(FalseGradient("b"), NOW, LAST) == ["b", "a", "b", "c", "d"]
    assert suspects(FalseGradient("new"), NOW, LAST) == ["new"]


def test_who_is_guilty_by_the_median_is_banned() -> None:
    case = FalseProjection("a", "d")
    assert verdict(case, {"a": [9.0], "b": [9.0], "c": [9.0], "d": [9.0]}, "d", 9.0) == JuryVerdict(
        {"a": "false projection"}, ()
    )


def test_jurors_who_differ_are_banned() -> None:
    case = FalseGradient("new")
    found = verdict(case, {"a": [200.0], "b": [200.001], "c": [199.999], "d": [0.0]}, "a", 200.0)
    assert found.banned == {"new": "false gradient", "d": "false testimony"}


def test_slander_is_banned_and_a_near_miss_is_not() -> None:
    case = FalseProjection("a", "d")
    innocent = {name: [0.001] for name in "abcd"}
    assert verdict(case, innocent, "d", 50.0).banned == {"d": "slander"}
    near = {name: [0.99999] for name in "abcd"}
    assert verdict(case, near, "d", 1.00001) == JuryVerdict({}, ())


def test_complaints_that_were_answered_are_unfounded() -> None:
    case = FalseGradient("new")
    assert verdict(case, {name: [0.0] for name in "abcd"}, "b", None) == JuryVerdict({}, ("b",))
    guilty = verdict(case, {name: [80.0] for name in "abcd"}, "b", None)
    assert guilty == JuryVerdict({"new": "false gradient"}, ())


def test_an_owner_that_let_a_false_projection_pass_is_banned_but_for_a_near_miss() -> None:
    measured = {name: [70.0, 0.0, 0.0, 70.0, 1.5] for name in "abcd"}
    found = verdict(FalseGradient("b"), measured, "a", 70.0)
    assert found.banned == {"b": "false gradient", "c": "let a false projection pass"}


def test_of_an_aggregate_the_owner_or_a_worker_is_guilty_or_both() -> None:
    case = FalseAggregate("d")
    assert verdict(case, {name: [40.0, 0.0, 0.0, 0.0] for name in "abcd"}).banned == {"d": "false aggregate"}
    assert verdict(case, {name: [0.0, 0.0, 12.0, 0.0] for name in "abcd"}).banned == {"b": "false projection"}
    both = verdict(case, {name: [40.0, 0.0, 0.0, 12.0] for name in "abcd"})
    assert both.banned == {"d": "false aggregate", "c": "false projection"}
