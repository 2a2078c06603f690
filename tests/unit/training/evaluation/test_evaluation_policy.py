"""Which peer evaluates, which losses count, and when a run ends."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from swarm_training.core.config import EvaluationPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.record import HeldOutLoss, Progress
from swarm_training.evaluation.policy import (
    NUM_EVALUATORS,
    EvaluationHistory,
    evaluators_of,
    have_ended,
    is_known,
    reason_to_end,
    steps_to_keep,
    to_agree_on,
    whose_turn,
)
from swarm_training.pb import training_pb2 as pb

POLICY = EvaluationPolicy(every=10, patience=2, least_improvement=0.1)
NOW = Moment(1, 60)
EARLIER = EvaluationHistory.of([HeldOutLoss(Moment(0, 10), 3.0, 8), HeldOutLoss(Moment(0, 20), 2.0, 8)])


def found(step: int, loss: float = 1.0, samples: int = 8, rollbacks: int = 1) -> HeldOutLoss:
    return HeldOutLoss(Moment(rollbacks, step), loss, samples)


def record(peer_id: str, loss: HeldOutLoss | None = None, **changes: object) -> Progress:
    return replace(Progress("toy", peer_id, rollbacks=1, step=60, held_out=loss), **changes)


def history(*losses: float) -> EvaluationHistory:
    return EvaluationHistory.of(found(10 * number, loss) for number, loss in enumerate(losses, 1))


def test_a_few_members_evaluate_in_an_order_that_changes_with_the_step() -> None:
    members = [f"peer{number}" for number in range(9)]
    orders = {evaluators_of("toy", Moment(0, step), members) for step in range(20)}
    assert {len(order) for order in orders} == {NUM_EVALUATORS} and len({order[0] for order in orders}) > 4
    assert evaluators_of("toy", NOW, reversed(members)) == evaluators_of("toy", NOW, members)


def test_the_first_evaluator_that_is_there_and_has_not_failed_has_its_turn() -> None:
    order = ("a", "b", "c")
    assert whose_turn(order, NOW, [record("c"), record("b"), record("a")]) == "a"
    assert whose_turn(order, NOW, [record("c"), record("b")]) == "b"
    assert whose_turn(order, NOW, [record("b", found(60, samples=0)), record("c", found(50, samples=0))]) == "c"
    assert whose_turn(order, NOW, [record("z")]) is None


def test_a_loss_is_known_once_a_peer_has_published_it_or_a_later_one_is_agreed_on() -> None:
    assert not is_known(NOW, EARLIER, [record("a", found(60, samples=0)), record("b", found(50)), record("c")])
    assert is_known(NOW, EARLIER, [record("a", found(60))])
    assert is_known(Moment(0, 15), EARLIER, [])


@pytest.mark.parametrize(
    "wrong",
    [
        found(60, samples=0),
        found(55),  # is not evaluated
        found(70),  # is to come
        found(60, rollbacks=0),  # is undone
        found(20),  # is known
        found(0),
    ],
)
def test_losses_of_other_steps_and_of_undone_ones_do_not_count(wrong: HeldOutLoss) -> None:
    signed = pb.SignedProgress(progress=b"wrong")
    assert to_agree_on(POLICY, EARLIER, NOW, [(record("a", wrong), signed)], 4) == []
    assert EARLIER.observed(POLICY, NOW, [wrong]) == EARLIER


def test_of_each_step_one_loss_is_agreed_on_and_the_newest_few_steps_are() -> None:
    records = [record(name, found(step)) for name, step in (("b", 50), ("a", 50), ("c", 30), ("d", 40))]
    evaluated = [(each, pb.SignedProgress(progress=each.peer_id.encode())) for each in records]
    assert [each.progress for each in to_agree_on(POLICY, EARLIER, NOW, evaluated, 2)] == [b"d", b"a"]
    later = EARLIER.observed(POLICY, NOW, [found(50, 1.0), found(40, 1.5)])
    assert [(each.step, each.loss) for each in later.losses] == [(10, 3.0), (20, 2.0), (40, 1.5), (50, 1.0)]


@pytest.mark.parametrize(
    ("losses", "best", "ends"),
    [
        ((3.0,), 10, False),
        ((3.0, 2.0, 1.95), 30, False),
        ((3.0, 2.0, 1.95, 1.91), 40, True),  # each is lower, but not by enough
        ((3.0, 2.0, 2.5, 1.8, 1.9), 40, False),
        ((3.0, 2.0, inf, 2.0), 20, True),
        ((inf, inf), None, True),
    ],
)
def test_a_run_ends_after_losses_that_have_not_fallen(losses: tuple[float, ...], best: int | None, ends: bool) -> None:
    seen = history(*losses)
    assert (None if seen.best is None else seen.best.step) == best
    assert bool(reason_to_end(POLICY, seen)) == ends
    assert not reason_to_end(replace(POLICY, patience=0, least_improvement=0.0), seen)


def test_the_reason_says_what_was_expected_and_what_was_the_lowest() -> None:
    reason = reason_to_end(POLICY, history(3.0, 2.0, 2.5, 2.0))
    assert reason == "the loss on held-out data has not fallen by 0.1 in 2 evaluations: the lowest is 2, of step 20"


def test_a_rollback_undoes_the_losses_of_later_steps() -> None:
    seen = history(3.0, 2.0, 1.0).up_to(20)
    assert seen.best is not None and (seen.best.step, seen.best.loss) == (20, 2.0)


def test_one_peer_of_several_cannot_end_the_run_of_the_others() -> None:
    own = record("a")
    last = {name: record(name, step=61, has_ended=True) for name in "bcdef"}
    assert not have_ended(own, "abcdef", [last["b"], last["c"]])
    assert have_ended(own, "abcdef", [last["b"], last["c"], last["d"]])
    assert have_ended(own, "ab", [last["b"]]) and not have_ended(own, "ab", [record("b", has_ended=True)])
    assert not have_ended(own, "a", [last["b"]])


def test_the_checkpoints_of_the_lowest_loss_and_of_the_newest_evaluations_stay() -> None:
    assert steps_to_keep(POLICY, history(3.0, 1.0, 2.0), 37) == {20}
    assert steps_to_keep(POLICY, history(3.0, 1.0, 2.0), 47) == {20, 40}
    assert steps_to_keep(POLICY, history(3.0, 1.0, 2.0), 57) == {20, 40, 50}, "that of 40 may still be computed"
    assert steps_to_keep(POLICY, EvaluationHistory(), 9) == frozenset()
    assert steps_to_keep(EvaluationPolicy(), EvaluationHistory(), 50) == frozenset()
