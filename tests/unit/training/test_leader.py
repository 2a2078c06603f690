"""What the leader of a meeting decides, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from swarm_protocol.codecs.bitmap import to_bits
from swarm_training.core.config import RollbackPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING, Progress
from swarm_training.meeting.leader import Leader, LeaderContext, MeetingState, Replies
from swarm_training.pb import training_pb2 as pb
from swarm_training.rollback.divergence import LossHistory
from swarm_training.rollback.judging import RollbackJudge

ALL = LeaderContext(
    frozenset("abcd"), frozenset("abcd"), ("a", "b", "c", "d"), frozenset(), wait_s=10.0, deadline_s=5.0
)


def join(leader: Leader, *names: str, now: float = 0.0, **fields: object) -> None:
    for name in names:
        record = Progress("toy", name, address=f"{name}:1")
        step, contribution = leader.moment.step, f"of {name}".encode()
        leader.join(name, pb.Join(step=step, samples=5, contribution=contribution, **fields), record, now)


def kinds(replies: Replies) -> dict[str, str]:
    """By peer, the last it gets."""
    return {peer: str(reply.WhichOneof("kind")) for peer, reply in replies}


def credited(joins: Sequence[pb.Join]) -> bytes:
    """Their contributions, joined."""
    return b" ".join(sorted(join.contribution for join in joins))


def formed(*names: str, context: LeaderContext = ALL) -> Leader:
    leader = Leader("toy", Moment(0, 3), "meeting", credited)
    join(leader, *names)
    assert kinds(leader.tick(context, 11.0)) == dict.fromkeys(names, "group")
    return leader


def report(leader: Leader, names: str, held: set[int], **fields: object) -> Replies:
    replies: Replies = []
    for name in names:
        message = pb.Report(num_chunks=4, held=to_bits(held, 4), **fields)
        replies += leader.report(name, message, ALL, 12.0)
    return replies


def accept(leader: Leader, names: str, digest: bytes = b"result", context: LeaderContext = ALL) -> Replies:
    replies: Replies = []
    for name in names:
        replies += leader.report(name, pb.Report(phase=1, digest=digest), context, 13.0)
    return replies


def test_a_group_is_formed_once_all_who_are_expected_have_come() -> None:
    leader = Leader("toy", Moment(0, 3), "meeting")
    join(leader, "a", "b", "c")
    assert leader.tick(ALL, 1.0) == []
    join(leader, "d", now=1.0)
    replies = leader.tick(ALL, 1.0)
    assert kinds(replies) == dict.fromkeys("abcd", "group")
    group = replies[0][1].group
    assert list(group.roster) == ["a", "b", "c", "d"] and group.step == 3 and group.ballot == 1


def test_a_straggler_is_waited_for_no_longer_than_that() -> None:
    leader = Leader("toy", Moment(0, 3), "meeting")
    join(leader, "a", "b", "c")
    assert leader.tick(ALL, 9.9) == []
    assert kinds(leader.tick(ALL, 10.0)) == dict.fromkeys("abc", "group")


@pytest.mark.parametrize("present", ["a", "b", "cd", "bc"])
def test_a_group_without_a_quorum_meets_on_for_ever(present: str) -> None:
    leader = Leader("toy", Moment(0, 3), "meeting")
    join(leader, *present)
    assert leader.tick(ALL, 1000.0) == []
    alone = replace(ALL, expected=frozenset(present))
    assert leader.tick(alone, 1000.0) == []


def test_newcomers_count_too_before_a_group_is_formed() -> None:
    founder = replace(ALL, roster=("a",))
    leader = Leader("toy", Moment(0, 0), "meeting")
    join(leader, "a")
    assert leader.tick(founder, 1000.0) == []
    assert leader.tick(replace(founder, gone=frozenset("bcd")), 1000.0) != []


def test_what_lacks_is_repaired_then_accepted_then_committed() -> None:
    leader = formed("a", "b", "c", "d")
    assert report(leader, "abc", {0, 1, 2, 3}) == []
    plans = report(leader, "d", {0, 1})
    assert kinds(plans) == dict.fromkeys("abcd", "plan")
    plan = plans[0][1].plan
    assert (plan.phase, plan.attempt) == (0, 1) and {each.chunk for each in plan.fetch} == {2, 3} and not plan.redo
    assert report(leader, "abc", {0, 1, 2, 3}, attempt=1) == []
    plans = report(leader, "d", {0, 1, 2, 3}, attempt=1)
    assert plans[0][1].plan.phase == 1
    assert accept(leader, "abc") == []
    assert kinds(accept(leader, "d")) == dict.fromkeys("abcd", "commit")
    assert leader.stage is MeetingState.OVER


def test_who_dies_is_dropped_and_what_it_alone_had_is_added_up_again() -> None:
    leader = formed("a", "b", "c", "d")
    dropped = leader.leave("d", ALL, 12.0)
    assert kinds(dropped) == dict.fromkeys("abc", "dropped")
    plan = report(leader, "abc", {0, 1, 2})[-1][1].plan
    assert [each.chunk for each in plan.redo] == [3] and not plan.fetch


def test_who_does_not_report_is_dropped() -> None:
    leader = formed("a", "b", "c", "d")
    report(leader, "abc", {0, 1, 2, 3})
    assert leader.tick(ALL, 20.0) == []
    replies = leader.tick(ALL, 21.1)
    assert ("d", "dismissal") in [(peer, reply.WhichOneof("kind")) for peer, reply in replies]
    assert kinds(replies)["a"] == "plan"


def test_nothing_is_committed_without_a_quorum() -> None:
    leader = formed("a", "b", "c", "d")
    report(leader, "abcd", {0, 1, 2, 3})
    leader.leave("a", ALL, 12.0)
    leader.leave("b", ALL, 12.0)
    assert kinds(accept(leader, "cd")) == dict.fromkeys("cd", "dismissal")


def test_the_result_that_most_have_counts() -> None:
    leader = formed("a", "b", "c", "d")
    report(leader, "abcd", {0, 1, 2, 3})
    accept(leader, "a", b"odd")
    replies = accept(leader, "bcd")
    assert kinds(replies) == {"a": "dismissal", **dict.fromkeys("bcd", "commit")}
    assert {reply.commit.round for _, reply in replies if reply.HasField("commit")} == {b"of b of c of d"}


def test_who_was_dropped_is_not_credited() -> None:
    leader = formed("a", "b", "c", "d")
    report(leader, "abcd", {0, 1, 2, 3})
    accept(leader, "ad")
    leader.leave("d", ALL, 12.5)
    accept(leader, "b")
    assert accept(leader, "c")[0][1].commit.round == b"of a of b of c"


def test_of_a_result_that_is_taken_over_those_are_credited_who_brought_it() -> None:
    """The others of this group were not in the one which it came from, or failed before its end; one
    has the result from before it was handed on."""
    result = pb.Accepted(ballot=7, group="newer", digest=b"result", layout=[1.0, 2.0], roster=["a", "y"])
    older = pb.Accepted(ballot=3, group="older", digest=b"1", layout=[1.0, 0.0], roster=["a", "z"])
    handed_on = pb.Accepted(ballot=5, group="before", digest=b"result", layout=[1.0, 2.0], roster=["a", "y"])
    leader = Leader("toy", Moment(0, 3), "meeting", credited)
    join(leader, "a", "d", promised=7, accepted=result)
    join(leader, "b", promised=3, accepted=older)
    join(leader, "c", promised=5, accepted=handed_on)
    leader.tick(ALL, 0.0)
    report(leader, "abcd", {0, 1, 2, 3})
    assert accept(leader, "abcd")[0][1].commit.round == b"of a of c of d"


def test_a_result_that_somebody_has_accepted_is_taken_over() -> None:
    """It may have been committed by a leader who has died since."""
    older = pb.Accepted(ballot=3, group="older", digest=b"1", layout=[1.0, 0.0], roster=["a", "z"])
    newer = pb.Accepted(ballot=7, group="newer", digest=b"2", layout=[1.0, 2.0], roster=["a", "y"])
    leader = Leader("toy", Moment(0, 3), "meeting")
    join(leader, "a", promised=7, accepted=newer)
    join(leader, "b", promised=3, accepted=older)
    join(leader, "c", "d", promised=9)
    group = leader.tick(ALL, 0.0)[0][1].group
    assert (group.continues, group.ballot) == ("newer", 10)
    assert list(group.layout) == [1.0, 2.0] and list(group.roster) == ["a", "y"]
    report(leader, "bcd", set())
    leader.leave("a", ALL, 12.0)
    assert leader.stage is MeetingState.OVER  # nobody who is left holds it: they meet again, and average anew


def test_members_that_disagree_about_the_vector_average_nothing() -> None:
    leader = formed("a", "b", "c", "d")
    report(leader, "abc", {0, 1, 2, 3})
    replies = leader.report("d", pb.Report(num_chunks=5, held=b"\x1f"), ALL, 12.0)
    assert kinds(replies) == dict.fromkeys("abcd", "dismissal")


JUDGING = replace(ALL, judge=RollbackJudge(RollbackPolicy(), LossHistory()))
CHECKPOINT = pb.Checkpoint(step=2, state_digest=b"d" * 32)
TO_CHECKPOINT = pb.Rollback(step=2, state_digest=b"d" * 32)


def join_with_loss(leader: Leader, names: str, loss: float, **fields: object) -> None:
    for name in names:
        told = {"state": MEETING, "step": 3, "loss": loss, "loss_samples": 5}
        record = Progress("toy", name, address=f"{name}:1", **told)
        message = pb.Join(step=3, checkpoints=[CHECKPOINT], **fields)
        leader.join(name, message, record, 0.0)


def test_a_group_whose_losses_are_not_finite_goes_back_and_averages_nothing() -> None:
    leader = Leader("toy", Moment(0, 3), "meeting")
    join_with_loss(leader, "abc", inf)
    join_with_loss(leader, "d", 2.0, samples=5)
    group = leader.tick(JUDGING, 0.0)[0][1].group
    assert (group.go_back.step, group.go_back.state_digest, len(group.go_back.losses)) == (2, b"d" * 32, 4)
    replies: Replies = []
    for name in "abcd":
        replies += leader.report(name, pb.Report(digest=b"back"), ALL, 1.0)
    assert kinds(replies) == dict.fromkeys("abcd", "commit") and leader.stage is MeetingState.OVER


def test_without_a_checkpoint_there_is_an_average_if_there_can_be_one() -> None:
    leader = Leader("toy", Moment(0, 3), "meeting")
    join_with_loss(leader, "abcd", inf, samples=5)
    for joined in leader._joined.values():
        del joined.join.checkpoints[:]
    assert not leader.tick(JUDGING, 0.0)[0][1].group.HasField("go_back")


def test_a_rollback_that_somebody_has_accepted_is_taken_over() -> None:
    accepted = pb.Accepted(ballot=3, group="older", digest=b"1", layout=[1.0], roster=["a", "z"], go_back=TO_CHECKPOINT)
    leader = Leader("toy", Moment(0, 3), "meeting")
    join(leader, "a", promised=3, accepted=accepted)
    join(leader, "b", "c", "d")
    group = leader.tick(ALL, 0.0)[0][1].group
    assert (group.go_back, group.continues, list(group.roster)) == (TO_CHECKPOINT, "older", ["a", "z"])


def test_an_average_that_somebody_has_accepted_comes_before_a_rollback() -> None:
    accepted = pb.Accepted(ballot=3, group="older", digest=b"1", layout=[1.0], roster=["a", "b", "c", "d"])
    leader = Leader("toy", Moment(0, 3), "meeting")
    join_with_loss(leader, "abc", inf, promised=3)
    join_with_loss(leader, "d", inf, promised=3, accepted=accepted)
    group = leader.tick(JUDGING, 0.0)[0][1].group
    assert group.continues == "older" and not group.HasField("go_back")


def test_nobody_meets_for_gradients_that_nobody_has() -> None:
    leader = Leader("toy", Moment(0, 3), "meeting")
    join_with_loss(leader, "abcd", 2.0)
    assert leader.tick(JUDGING, 1000.0) == []


def test_a_group_agrees_on_evaluations_and_hands_those_of_an_accepted_result_on() -> None:
    new, old = pb.SignedProgress(progress=b"new"), pb.SignedProgress(progress=b"old")
    leader = Leader("toy", Moment(0, 3), "meeting")
    join(leader, *"abcd")
    assert leader.tick(replace(ALL, is_over=True), 11.0) == []
    assert list(leader.tick(replace(ALL, evaluations=(new,)), 11.0)[0][1].group.evaluations) == [new]
    later = Leader("toy", Moment(0, 3), "later")
    join(later, *"abc")
    join(later, "d", accepted=pb.Accepted(ballot=1, group="meeting", digest=b"result", layout=[1.0], evaluations=[old]))
    assert list(later.tick(replace(ALL, evaluations=(new,)), 11.0)[0][1].group.evaluations) == [old]
