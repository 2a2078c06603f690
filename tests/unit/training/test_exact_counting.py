"""Micro-batches that count once each: records, decisions, groups and sums."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.codecs.bitmap import are_disjoint, contains, fits, is_partition, size_of, to_bits
from swarm_training.averaging.group import Group
from swarm_training.averaging.sums import ExactSum
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING, Kept, Progress
from swarm_training.core.signing import sign
from swarm_training.meeting.leader import Leader, LeaderContext, Replies
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress import policy
from swarm_training.progress.policy import LocalView
from tests.worlds.identities import identity

SIZE = 4
SETS = st.lists(st.sets(st.integers(0, 11)), max_size=4)


def record(name: str, done: set[int], **fields: Any) -> Progress:
    bits = to_bits(done, SIZE)
    values = {"address": f"{name}:1", "target_batch_size": SIZE, "samples": len(done), "micro_batches": bits}
    return Progress("toy", name, **values | fields)


@given(SETS)
def test_bitmaps_are_sets(sets: list[set[int]]) -> None:
    bits = [to_bits(each, 12) for each in sets]
    counts = [number for each in sets for number in each]
    assert [size_of(each) for each in bits] == list(map(len, sets))
    assert are_disjoint(bits) == (len(counts) == len(set(counts)))
    assert is_partition(bits, 12) == (sorted(counts) == list(range(12)))
    assert all(
        contains(each, number) == (number in own) for each, own in zip(bits, sets, strict=True) for number in range(20)
    )


def test_a_bitmap_fits_its_batch() -> None:
    assert fits(b"\x0f", 4) and not fits(b"\x1f", 4) and not fits(b"", 4) and not fits(b"\x0f\0", 4)


def test_a_record_survives_the_wire_and_an_impossible_one_does_not() -> None:
    right = record("a", {0, 3}, accepted=b"x", decided=b"y", kept=Kept(0, b"k"), replica=Kept(7, b"r"))
    assert Progress.from_proto(right.to_proto()) == right
    for wrong in (
        replace(right, samples=3),
        replace(right, micro_batches=b"\x19"),
        replace(right, micro_batches=b"\x09\0"),
    ):
        with pytest.raises(ValueError, match="not a part of its batch"):
            Progress.from_proto(wrong.to_proto())


@pytest.mark.parametrize(
    ("others", "complete"),
    [
        ([{2, 3}], True),
        ([{2}, {3}], True),
        ([{2}], False),
        ([{1, 2, 3}], False),  # 1 would count twice
    ],
)
def test_a_batch_is_complete_if_each_micro_batch_is_there_once(others: list[set[int]], complete: bool) -> None:
    mates = tuple(record(f"m{number}", done, state=MEETING) for number, done in enumerate(others))
    assert policy.is_batch_complete(LocalView(record("a", {0, 1}), mates)) == complete


def test_a_result_that_may_be_decided_is_handed_on_and_a_decided_one_is_waited_for() -> None:
    own = record("a", {0})
    holding = record("b", {1}, accepted=b"result", decided=b"result")
    assert policy.is_batch_complete(LocalView(own, (record("b", {1}, accepted=b"result"),)))
    assert not policy.is_batch_complete(LocalView(own, (record("b", {1, 2, 3}, decided=b"result"),)))
    assert policy.is_batch_complete(LocalView(replace(own, accepted=b"result"), (holding,)))
    assert not policy.is_batch_complete(LocalView(replace(own, accepted=b"another"), (holding,)))
    assert policy.leader_of(LocalView(own, (holding,))) is own


@pytest.mark.parametrize(
    ("own", "mate", "discards"),
    [
        (record("b", {0, 1}), record("a", {1}), True),
        (record("b", {0, 1}), record("c", {1}), False),  # the other one does
        (record("b", {0, 1}), record("a", {2}), False),
        (record("b", {0, 1}), record("a", {1}, step=7), False),
        (record("b", set()), record("a", {1}), False),
        (record("b", {0, 1}), record("c", {2}, decided=b"without"), True),
        (record("b", {0, 1}, accepted=b"ours"), record("c", {2}, decided=b"ours"), False),
        (record("b", {0, 1}, accepted=b"ours"), record("a", {1}), False),  # what it holds may be decided
        (record("b", {0, 1}, decided=b"ours"), record("a", {1}), False),
    ],
)
def test_who_has_what_another_has_gives_it_up(own: Progress, mate: Progress, discards: bool) -> None:
    assert policy.must_discard(LocalView(own, (mate,))) == discards


ALL = LeaderContext(frozenset("abc"), frozenset("abc"), ("a", "b", "c"), frozenset(), wait_s=10.0, deadline_s=5.0)


def leading(sets: dict[str, set[int]], **fields: Any) -> Leader:
    leader = Leader("toy", Moment(0, 3), "meeting")
    for name, done in sets.items():
        leader.join(name, pb.Join(step=3, samples=len(done), **fields), record(name, done, step=3), 0.0)
    return leader


def kinds(replies: Replies) -> dict[str, str]:
    return {peer: str(reply.WhichOneof("kind")) for peer, reply in replies}


@pytest.mark.parametrize("sets", [[{0, 1}, {2, 3}, set()], [{0}, {1, 2}, {3}]])
def test_a_group_has_every_micro_batch_once(sets: list[set[int]]) -> None:
    leader = leading(dict(zip("abc", sets, strict=True)))
    assert kinds(leader.tick(ALL, 1.0)) == dict.fromkeys("abc", "group")


@pytest.mark.parametrize("sets", [[{0, 1}, {2}, set()], [{0, 1}, {1, 2, 3}, set()]])
def test_without_that_there_is_none_however_late_it_is(sets: list[set[int]]) -> None:
    leader = leading(dict(zip("abc", sets, strict=True)))
    assert leader.tick(ALL, 1e6) == []
    accepted = leading(dict(zip("abc", sets, strict=True)), accepted=pb.Accepted(ballot=1, group="g", layout=[1.0]))
    group = accepted.tick(ALL, 1.0)[0][1].group
    assert group.continues == "g"


def test_large_groups_exchange_directly() -> None:
    names = [f"p{number:02}" for number in range(20)]
    sets = {name: {0, 1, 2, 3} if name == "p07" else set[int]() for name in names}
    context = replace(ALL, expected=frozenset(names), known=frozenset(names), roster=tuple(names))
    replies = leading(sets).tick(context, 1.0)
    assert len(replies) == 20 and not replies[0][1].group.grid


@pytest.mark.parametrize(("dead", "ends"), [("a", True), ("c", False)])
def test_nothing_is_added_up_again_without_one_who_brought_something(dead: str, ends: bool) -> None:
    leader = leading({"a": {0, 1}, "b": {2, 3}, "c": set()})
    leader.tick(ALL, 1.0)
    leader.leave(dead, ALL, 2.0)
    replies: Replies = []
    for name in {"a", "b", "c"} - {dead}:
        replies += leader.report(name, pb.Report(num_chunks=2, held=b"\x01"), ALL, 2.0)
    assert set(kinds(replies).values()) == {"dismissal" if ends else "plan"}


def group_of(*sets: set[int], weights: list[int] | None = None, **fields: Any) -> pb.Group:
    members = []
    for number, done in enumerate(sets):
        own = record(identity(number).peer_id, done)
        weight = len(done) if weights is None else weights[number]
        members.append(pb.Member(record=sign(own, identity(number)), weight=weight, share=1.0))
    shares = [1.0] * len(members)
    return pb.Group(id="g", ballot=1, members=members, deadline_s=1.0, layout=shares, roster=["x"], **fields)


def test_members_check_what_the_leader_says_of_their_micro_batches() -> None:
    assert Group.parse(group_of({0, 1}, {2, 3})).num_micro_batches == SIZE
    assert Group.parse(group_of({0}, {1}, continues="earlier")).num_micro_batches == SIZE
    with pytest.raises(ValueError, match="not complete"):
        Group.parse(group_of({0, 1}, {2}))
    with pytest.raises(ValueError, match="some are there twice"):
        Group.parse(group_of({0, 1}, {1, 2, 3}))
    with pytest.raises(ValueError, match="do not count the same"):
        Group.parse(group_of({0, 1}, {2, 3}, weights=[2, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_added_in_the_order_of_the_members_and_divided_by_all(dtype: torch.dtype) -> None:
    parts = {member: torch.randn(50, dtype=dtype) * 10.0**member for member in range(3)}
    given = {member: part.clone() for member, part in parts.items()}
    expected = (parts[0] + parts[1] + parts[2]) / 7
    for order in itertools.permutations(range(3)):
        total = ExactSum(range(3), 7)
        for member in order:
            assert not total.is_done
            total.put(member, parts[member])
            total.put(member, parts[member])  # again: ignored
        assert total.is_done and total.mean is not None
        assert torch.equal(total.mean, expected) and total.mean.dtype == dtype
    assert all(torch.equal(parts[member], given[member]) for member in parts)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_without_one_of_the_parts_there_is_no_mean(after: int) -> None:
    total = ExactSum(range(3), 7)
    for member in range(after):
        total.put(member, torch.ones(2))
    total.leave_out(after)
    assert total.is_done and total.mean is None and not total.missing
    for member in range(3):
        total.put(member, torch.ones(2))
    assert total.mean is None


def test_who_has_given_its_part_is_not_missed() -> None:
    total = ExactSum([0, 1], 2)
    total.put(0, torch.ones(2))
    total.leave_out(0)
    total.put(1, torch.ones(2))
    assert total.mean is not None and total.mean.tolist() == [1.0, 1.0]


def test_runs_that_count_samples_have_the_settings_that_they_had() -> None:
    assert "counting" not in TrainingConfig().common
    assert TrainingConfig(counting="exact").common["counting"] == "exact"
