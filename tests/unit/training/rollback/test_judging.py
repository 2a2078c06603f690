"""What counts as a reason to go back, and which checkpoint is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_training.core.config import RollbackPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING, TRAINING, Progress
from swarm_training.pb import training_pb2 as pb
from swarm_training.rollback.divergence import LossHistory
from swarm_training.rollback.judging import (
    RollbackJudge,
    agreed_checkpoint,
    digest_of,
    is_justified,
    losses_of,
    proposal,
)

NOW = Moment(1, 20)
POLICY = RollbackPolicy(margin=0.5, patience=3, window=8, warmup=4)
JUDGE = RollbackJudge(POLICY, LossHistory((2.0,) * 8))
DIGEST = b"d" * 32


def record(name: str, loss: float | None = 2.0, **changes: object) -> Progress:
    told = {} if loss is None else {"loss": loss, "loss_samples": 5}
    own = Progress("toy", name, state=MEETING, rollbacks=1, step=20, state_digest=b"now", **told)
    return replace(own, **changes)


def joining(samples: int = 5, **checkpoints: bytes) -> pb.Join:
    """``s18=b"…"``: it holds the checkpoint of step 18 with that digest."""
    held = [pb.Checkpoint(step=int(name[1:]), state_digest=digest) for name, digest in checkpoints.items()]
    return pb.Join(samples=samples, checkpoints=held)


def test_losses_are_of_those_who_meet_now_and_tell_one() -> None:
    records = [record("a"), record("b", None), record("c", state=TRAINING), record("d", inf), record("e", step=19)]
    assert losses_of(NOW, records) == [2.0, None, None, inf, None]


@pytest.mark.parametrize(
    ("losses", "goes_back"),
    [
        ([inf, inf, 2.0], True),
        ([inf, 2.0, 2.0], False),
        ([inf, inf, 2.0, 2.0], False),  # half is not enough
        ([inf, inf, None, None], False),  # who says nothing does not agree
        ([inf, inf, None], True),
        ([inf], True),
        ([9.0, 9.0, 9.0], False),  # for the first time
    ],
)
def test_the_leader_proposes_what_every_member_finds_justified(losses: list[float | None], goes_back: bool) -> None:
    records = [record(name, loss) for name, loss in zip("abcd", losses, strict=False)]
    found = proposal(JUDGE, NOW, [joining(s15=b"old", s18=DIGEST, s20=b"late") for _ in records], records)
    assert (found is not None) == goes_back
    names = [each.peer_id for each in records]
    claimed = pb.Rollback(step=18, state_digest=DIGEST)
    assert is_justified(JUDGE, NOW, claimed, records, names, ()) == goes_back
    if found is not None:
        assert (found.step, found.state_digest, len(found.losses)) == (18, DIGEST, len(records))


def test_a_high_loss_is_known_after_so_many_steps_and_its_first_state_is_not_taken() -> None:
    judge = replace(JUDGE, history=replace(JUDGE.history, num_high=2))
    records = [record("a", 2.6), record("b", 2.7)]
    joins = [joining(s17=b"old", s18=b"high") for _ in records]
    assert proposal(JUDGE, NOW, joins, records) is None
    found = proposal(judge, NOW, joins, records)
    assert found is not None and found.step == 17  # high were 18, 19 and 20
    assert not is_justified(judge, NOW, pb.Rollback(step=18, state_digest=DIGEST), records, "ab", ())
    assert proposal(replace(judge, policy=None), NOW, joins, records) is None


def test_the_losses_of_a_few_are_no_reason() -> None:
    """As many must have met as decide about the next step; and nobody counts twice."""
    go_back = pb.Rollback(step=18, state_digest=DIGEST)
    few = [record("c", inf), record("d", inf)]
    assert not is_justified(JUDGE, NOW, go_back, few, "abcd", ())
    assert is_justified(JUDGE, NOW, go_back, few, "abcd", "ab")
    assert not is_justified(JUDGE, NOW, go_back, [few[0]] * 3, "abc", ())
    assert not is_justified(JUDGE, NOW, go_back, [], (), ())


def test_an_order_is_reason_enough_and_no_other_is() -> None:
    judge = replace(JUDGE, orders={b"late": 17, b"early": 16, b"to come": 20})
    records = [record("a"), record("b")]
    joins = [joining(s15=b"a", s16=DIGEST, s18=b"b") for _ in records]
    found = proposal(judge, NOW, joins, records)
    assert found == pb.Rollback(step=16, state_digest=DIGEST, order=b"early")
    assert judge.due(Moment(1, 16)) == [] and judge.due(Moment(1, 17)) == [b"early"]
    assert is_justified(judge, NOW, found, [], "ab", ())
    for wrong in (pb.Rollback(step=17, order=b"early"), pb.Rollback(step=3, order=b"unheard of")):
        assert not is_justified(judge, NOW, wrong, [], "ab", ())


def test_an_order_that_cannot_be_carried_out_stands_in_the_way_of_nothing() -> None:
    records = [record("a"), record("b")]
    joins = [joining(s15=DIGEST) for _ in records]
    too_old = replace(JUDGE, orders={b"too old": 3})
    assert proposal(too_old, NOW, joins, records) is None
    found = proposal(replace(JUDGE, orders={b"too old": 3, b"later": 16}), NOW, joins, records)
    assert found == pb.Rollback(step=15, state_digest=DIGEST, order=b"later")
    diverged = [record("a", inf), record("b", inf)]
    by_losses = proposal(too_old, NOW, joins, diverged)
    assert by_losses is not None and by_losses.order == b"" and by_losses.step == 15 and len(by_losses.losses) == 2
    assert is_justified(too_old, NOW, by_losses, diverged, "ab", ())


def test_a_batch_of_which_nothing_is_left_is_dropped_where_there_is_no_checkpoint() -> None:
    records = [record("a", inf), record("b", inf)]
    found = proposal(JUDGE, NOW, [joining(0), joining(0)], records)
    assert found is not None and (found.step, found.state_digest) == (20, b"now")
    assert is_justified(JUDGE, NOW, found, records, "ab", ())
    assert proposal(JUDGE, NOW, [joining(0), joining(1)], records) is None
    assert proposal(JUDGE, NOW, [joining(0), joining(0)], [record("a"), record("b")]) is None


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ([], None),
        ([{}, {}], None),
        ([{3: b"a", 6: b"b"}, {3: b"a", 6: b"b"}, {6: b"b"}, {}], (6, b"b")),
        ([{3: b"a", 6: b"b"}, {3: b"a"}, {3: b"a", 6: b"evil"}], (3, b"a")),
        ([{3: b"a"}, {6: b"evil"}], None),
        ([{3: b"a"}, {}, {}, {}], (3, b"a")),
    ],
)
def test_the_newest_checkpoint_that_most_holders_have(
    claims: list[Mapping[int, bytes]], expected: tuple[int, bytes] | None
) -> None:
    assert agreed_checkpoint(claims) == expected


@given(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99), st.binary(min_size=32, max_size=32))
def test_the_digest_of_a_decision_names_all_of_it(rollbacks: int, step: int, to_step: int, digest: bytes) -> None:
    go_back = pb.Rollback(step=to_step, state_digest=digest)
    others = [
        digest_of("other", Moment(rollbacks, step), go_back),
        digest_of("toy", Moment(rollbacks + 1, step), go_back),
        digest_of("toy", Moment(rollbacks, step + 1), go_back),
        digest_of("toy", Moment(rollbacks, step), pb.Rollback(step=to_step + 1, state_digest=digest)),
        digest_of("toy", Moment(rollbacks, step), pb.Rollback(step=to_step, state_digest=bytes(31) + b"\1")),
    ]
    own = digest_of("toy", Moment(rollbacks, step), pb.Rollback(step=to_step, state_digest=digest, order=b"x"))
    assert own == digest_of("toy", Moment(rollbacks, step), go_back)
    assert digest == bytes(31) + b"\1" or own not in others
