"""Large groups on a grid: where members stand, and what their rounds come to."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.wire.constants import MAX_MESSAGE_BYTES
from swarm_training.averaging.chunks import cut
from swarm_training.averaging.grid import Grid, needs_grid
from swarm_training.averaging.grid_attempt import GridAttempt
from swarm_training.averaging.group import Group
from swarm_training.compression.codecs import codec_of
from swarm_training.core.config import MAX_MEMBERS
from swarm_training.core.record import Progress
from swarm_training.core.signing import MAX_RECORD_BYTES, sign
from swarm_training.pb import training_pb2 as pb
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.identities import identity
from tests.worlds.reducers import Traffic, group_of, reduce_all
from tests.worlds.runs import World

pytestmark = IN_VIRTUAL_TIME

SHARES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 10.0]), min_size=17, max_size=MAX_MEMBERS).filter(needs_grid)


@given(SHARES)
def test_every_owner_has_somebody_who_adds_up_for_it_in_each_row(shares: list) -> None:
    grid = Grid.of(shares)
    assert sorted(member for row in grid.rows for member in row) == list(range(len(shares)))
    assert all(grid.row_of[member] == row for row, members in enumerate(grid.rows) for member in members)
    assert len(grid.rows) == math.ceil(math.sqrt(len(shares))) or len(grid.rows) == sum(map(bool, shares))
    for owner, share in enumerate(shares):
        if share:
            adders = [grid.row_owner(row, owner) for row in range(len(grid.rows))]
            assert all(grid.row_of[adder] == row and shares[adder] for row, adder in enumerate(adders))
            assert adders[grid.row_of[owner]] == owner
    sizes = [len(row) for row in grid.rows]
    assert max(sizes) - min(sizes) <= 1 or not all(shares)


def test_what_a_member_adds_up_for_its_row_is_in_proportion_to_its_share() -> None:
    shares = random.Random(0).sample([10.0] * 5 + [5.0] * 5 + [2.0] * 5 + [1.0] * 10, 25)
    grid = Grid.of(shares)
    for member, share in enumerate(shares):
        row = grid.row_of[member]
        assert sum(shares[owner] for owner in range(25) if grid.row_owner(row, owner) == member) == 5 * share


def test_sixteen_who_can_own_need_no_grid() -> None:
    assert not needs_grid([1.0] * 16 + [0.0] * 100)
    assert needs_grid([1.0] * 17)


def test_the_largest_group_fits_into_a_message() -> None:
    record = pb.SignedProgress(progress=bytes(MAX_RECORD_BYTES))
    message = pb.Group(
        members=[pb.Member(record=record, weight=1 << 62, share=1.0)] * MAX_MEMBERS,
        layout=[1.0] * MAX_MEMBERS,
        roster=["x" * 64] * MAX_MEMBERS,
    )
    assert pb.MeetReply(group=message).ByteSize() < MAX_MESSAGE_BYTES


@pytest.mark.parametrize(("owners", "continues"), [(16, ""), (17, "another")])
def test_a_group_that_needs_no_grid_is_on_none(owners: int, continues: str) -> None:
    members = [
        pb.Member(record=sign(Progress("toy", identity(n).peer_id, address="sim:1"), identity(n)), weight=1, share=1.0)
        for n in range(owners)
    ]
    fields = {"layout": [1.0] * owners, "roster": ["x"], "deadline_s": 5.0}
    assert Group.parse(pb.Group(members=members, grid=owners > 16, **fields)).grid is (owners > 16)
    with pytest.raises(ValueError, match="grid"):
        Group.parse(pb.Group(members=members, grid=True, continues=continues, **fields))


def lone_attempt(me: int = 0) -> GridAttempt:
    """Of one of 25 members in rows 0, 5, 10, …; 1, 6, 11, …; each with a weight of 2, and 5 chunks."""
    chunks = cut(25 * 20, [1.0] * 25, 4)
    codec = codec_of("fp32")
    weights = dict.fromkeys(range(25), 2)
    return GridAttempt(Grid.of([1.0] * 25), me, chunks, weights, (), lambda _, mean: codec.encode(mean))


@pytest.mark.parametrize("weight", [10.001, math.inf, math.nan, -1.0])
def test_no_row_has_more_weight_than_its_members(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        lone_attempt().put_row(0, 1, torch.ones(4), weight)


def test_who_adds_up_nothing_for_an_owner_gives_it_no_row() -> None:
    attempt = lone_attempt()
    assert attempt.serves(1) == (0, 1, 2, 3, 4)
    assert attempt.serves(5) == attempt.own and len(attempt.own) == 25
    assert attempt.serves(6) == ()


@pytest.mark.parametrize(("owners", "hidden", "unequal"), [(17, 0, False), (25, 9, True), (20, 0, True)])
async def test_all_get_the_same_bits_which_are_the_weighted_mean(owners: int, hidden: int, unequal: bool) -> None:
    rng = random.Random(owners)
    shares = [rng.uniform(0.1, 10.0) if unequal else 1.0 for _ in range(owners)] + [0.0] * hidden
    weights = [rng.randrange(0, 100) for _ in shares]
    length = 9 * len(shares)
    group, order = group_of(shares, weights)
    gradients = torch.randn(len(shares), length, generator=torch.Generator().manual_seed(owners))
    world = World()
    traffic = Traffic(world)
    reducers = await reduce_all(world, group, list(gradients[order]))
    results = [reducer.round.results for reducer in reducers]
    assert all(each == results[0] for each in results) and all(each.round.is_complete for each in reducers)
    mean = await reducers[0].round.mean()
    exact = (gradients.double() * torch.tensor(weights)[:, None]).sum(0) / sum(weights)
    assert torch.allclose(mean.double(), exact, rtol=1e-5, atol=1e-6)
    for reducer, peer_id in zip(reducers, group.peer_ids, strict=True):
        assert not reducer.round.broken
        assert traffic.opened[peer_id] <= 2 * (math.sqrt(len(shares)) - 1) + 2
        assert (reducer.round.bytes_sent, reducer.round.bytes_received) == (
            traffic.sent[peer_id],
            traffic.received[peer_id],
        )
    called = {target for _, _, target, kind in world.log if kind == "open"}
    assert called == {member.record.peer_id for member in group.members if member.share}


@pytest.mark.parametrize("grid", [False, True])
async def test_a_grid_costs_fewer_streams_and_no_more_bytes(grid: bool) -> None:
    """Each of 25 peers has 2 (sqrt(25) - 1) = 8 streams instead of 24; both ways it sends and receives 2 (1 - 1/25)
    times the gradient."""
    group, _ = group_of([1.0] * 25, [1] * 25)
    world = World()
    traffic = Traffic(world)
    await reduce_all(world, replace(group, grid=grid), list(torch.randn(25, 100)))
    assert set(traffic.opened.values()) == {8 if grid else 24}
    assert set(traffic.sent.values()) == set(traffic.received.values()) == {2 * 4 * 100 * 24 // 25}
