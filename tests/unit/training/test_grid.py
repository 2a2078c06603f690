"""Large groups on a grid: where members stand, and what their rounds come to."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
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
from swarm_training.compression.error_feedback import ChunkPlace, ErrorFeedback
from swarm_training.core.config import MAX_MEMBERS
from swarm_training.core.record import Progress
from swarm_training.core.signing import MAX_RECORD_BYTES, sign
from swarm_training.pb import training_pb2 as pb
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.identities import identity
from tests.worlds.reducers import Reducer, Traffic, group_of, reduce_all
from tests.worlds.runs import World, simulate

pytestmark = IN_VIRTUAL_TIME

SHARES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 10.0]), min_size=17, max_size=MAX_MEMBERS).filter(needs_grid)


# ------------------------------------------------------------ where members stand


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


# ------------------------------------------------------------ one attempt


def lone_attempt(me: int = 0) -> GridAttempt:
    """Of one of 25 members in rows 0, 5, 10, …; 1, 6, 11, …; each with a weight of 2, and 5 chunks."""
    chunks = cut(25 * 20, [1.0] * 25, 4)
    codec = codec_of("fp32")
    weights = dict.fromkeys(range(25), 2)
    return GridAttempt(Grid.of([1.0] * 25), me, chunks, weights, (), lambda _, mean: codec.encode(mean))


def of_own_row(attempt: GridAttempt, chunk: int, *members: int) -> None:
    for member in members:
        attempt.put(chunk, member, torch.full((4,), float(member)))


def outcome(attempt: GridAttempt, chunk: int) -> bytes | None:
    return asyncio.run(asyncio.wait_for(attempt.mean_of(chunk), 1.0))


def is_settled(attempt: GridAttempt, chunk: int) -> bool:
    return chunk in attempt._outcomes


def test_an_owner_weighs_rows_by_what_has_arrived_in_them() -> None:
    attempt = lone_attempt()
    of_own_row(attempt, 0, 0, 5, 10, 15)
    attempt.leave_out(20)
    for member in (1, 2, 3):
        attempt.put_row(0, member, torch.full((4,), float(member)), 10)
    assert not is_settled(attempt, 0)
    attempt.put_row(0, 4, None, 0)
    mean = (2 * (0 + 5 + 10 + 15) + 10 * (1 + 2 + 3)) / (8 + 30)
    assert outcome(attempt, 0) == torch.full((4,), mean).numpy().tobytes()


def test_a_chunk_is_lost_if_whoever_adds_up_another_row_is() -> None:
    """But not those whose row means have arrived before."""
    attempt = lone_attempt()
    of_own_row(attempt, 0, 0, 5, 10, 15, 20)
    for member in (1, 2, 3, 4):
        attempt.put_row(0, member, torch.ones(4), 10)
    attempt.leave_out(9)  # in row 4 as well, but in another column
    assert not is_settled(attempt, 1)
    attempt.leave_out(4)
    assert outcome(attempt, 0) is not None and outcome(attempt, 1) is None


def test_rows_have_less_time_than_owners() -> None:
    """So that the mean of a row with a straggler is there before the owner gives it up."""
    attempt = lone_attempt()
    (in_row, leave_out), (in_all, give_up) = attempt.deadlines
    assert in_row < in_all <= 1.0
    of_own_row(attempt, 0, 0, 5, 10, 15)
    leave_out()
    assert asyncio.run(attempt.row_mean(0))[1] == 8
    assert not is_settled(attempt, 0)
    for member in (1, 2, 3):
        attempt.put_row(0, member, torch.ones(4), 10)
    give_up()
    assert outcome(attempt, 0) is None and attempt.late >= {4}


@pytest.mark.parametrize("weight", [10.001, math.inf, math.nan, -1.0])
def test_no_row_has_more_weight_than_its_members(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        lone_attempt().put_row(0, 1, torch.ones(4), weight)


def test_who_adds_up_nothing_for_an_owner_gives_it_no_row() -> None:
    attempt = lone_attempt()
    assert attempt.serves(1) == (0, 1, 2, 3, 4)
    assert attempt.serves(5) == attempt.own and len(attempt.own) == 25
    assert attempt.serves(6) == ()


# ------------------------------------------------------------ whole rounds


@pytest.mark.parametrize(
    ("owners", "hidden", "unequal"), [(17, 0, False), (25, 9, True), (64, 0, False), (20, 0, True)]
)
async def test_all_get_the_same_bits_which_are_the_weighted_mean(owners: int, hidden: int, unequal: bool) -> None:
    rng = random.Random(owners)
    shares = [rng.uniform(0.1, 10.0) if unequal else 1.0 for _ in range(owners)] + [0.0] * hidden
    weights = [rng.randrange(0, 100) for _ in shares]
    length = (2 if owners == 64 else 9) * len(shares)
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


def test_what_int8_loses_on_either_level_comes_later() -> None:
    """The mean over many steps of one gradient: without error feedback it is off by what each step is off by."""
    count, length, steps = 9, 90, 20
    group, order = group_of([1.0] * count, [1] * count)
    group = replace(group, grid=True)
    gradients = torch.randn(count, length, generator=torch.Generator().manual_seed(0))
    exact = gradients.double().mean(0)

    async def error(encoders: list[ErrorFeedback | None]) -> float:
        total = torch.zeros(length, dtype=torch.float64)
        for _ in range(steps):
            world = World()
            reducers = [
                Reducer(world, group, me, gradients[number], codec="int8", chunk_elements=16, encoder=encoder)
                for me, (number, encoder) in enumerate(zip(order, encoders, strict=True))
            ]
            await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
            assert all(reducer.round.results == reducers[0].round.results for reducer in reducers)
            total += (await reducers[0].round.mean()).double()
            for encoder, reducer in zip(encoders, reducers, strict=True):
                if encoder is not None:
                    encoder.commit(reducer.round.settled)
        return float((total / steps - exact).square().mean().sqrt())

    def with_feedback(kinds: tuple[str, ...]) -> float:
        return simulate(lambda: error([Feedback(kinds) for _ in range(count)]))

    both, parts_alone = with_feedback(("part", "row", "mean")), with_feedback(("part", "mean"))
    assert both < simulate(lambda: error([None] * count)) / 4
    assert both < parts_alone / 2


class Feedback(ErrorFeedback):
    """Of some kinds of vectors alone."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__(codec_of("int8"))
        self._kinds = kinds

    def encode(self, place: ChunkPlace, chunk: torch.Tensor) -> bytes:
        return super().encode(place, chunk) if place.what.startswith(self._kinds) else self.codec.encode(chunk)


def test_the_error_after_the_first_level_is_that_of_the_theorem() -> None:
    """N numbers are averaged in r random groups of n = N/r: what is left of the mean squared distance to the mean.

    The mean of n that are drawn from N without replacement has the variance s²/n · (N - n)/(N - 1), where s² is that of
    all (Cochran, Sampling Techniques, theorem 2.2); with n = N/r, s² (r - 1)/(N - 1). Moshpit All-Reduce (Ryabinin et
    al., 2021) has (r - 1)/N + r/N² instead. That is more by (N - r)/(N² (N - 1)), less than 1/N².

    The numbers stay the same in all steps, and the order is that of the leader of each step. After the second level
    nothing is left.
    """
    for n, r in [(25, 5), (64, 8), (256, 16), (10_000, 100)]:
        more = (r - 1) / n + r / n**2 - (r - 1) / (n - 1)
        assert math.isclose(more, (n - r) / (n**2 * (n - 1)), rel_tol=1e-6) and 0 < more < 1 / n**2
    count, rows, steps = 25, 5, 200
    numbers = torch.arange(float(count))  # sums of these are exact

    async def left(step: int) -> float:
        """Of the initial distance, after the first level."""
        group, order = group_of([1.0] * count, [3] * count, step)
        reducers = await reduce_all(World(), group, [numbers[number : number + 1] for number in order])
        assert {float(await reducer.round.mean()) for reducer in reducers} == {12.0}
        grid = Grid.of(group.layout)
        (chunk,) = reducers[0].round.chunks
        means = []
        for row in range(rows):
            attempt = reducers[grid.row_owner(row, chunk.owner)].round._attempts[0]
            mean, weight = await attempt.row_mean(0)
            assert weight == 3 * count // rows
            means.append(float(mean))
        return statistics.pvariance(means, 12.0) / statistics.pvariance(numbers.tolist())

    async def all_left() -> list[float]:
        return [await left(step) for step in range(steps)]

    found = simulate(all_left)
    assert abs(statistics.mean(found) / ((rows - 1) / (count - 1)) - 1) < 0.08
    assert len(set(found)) > steps / 2
