"""Error feedback over whole rounds: a peer remembers what encoding has lost of the parts that owners have counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_protocol.codecs.bitmap import contains, from_bits
from swarm_protocol.errors import AccessDenied, PeerError, SwarmError
from swarm_training.averaging.grid import Grid
from swarm_training.averaging.group import Group
from swarm_training.averaging.round import AveragingRound
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.reducers import Reducer, group_of
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done

pytestmark = IN_VIRTUAL_TIME

INT8 = codec_of("int8")
LATE_S = 6.0  # the deadline of a group is 5 s
LENGTH = 240


class Members:
    """Peers that average again and again, with an encoder each.

    Attributes:
        given, applied: by peer, the sum of its vectors' chunks that were counted, and what owners have added up of it.
        means, results: the sums over rounds of the means of what was added up, and of what all have received.
    """

    def __init__(self, count: int) -> None:
        self.encoders = [ErrorFeedback(INT8) for _ in range(count)]
        self.given, self.applied = torch.zeros(2, count, LENGTH, dtype=torch.float64)
        self.means, self.results = torch.zeros(2, LENGTH, dtype=torch.float64)

    def errors(self, peer: int, what: str = "part") -> torch.Tensor:
        return self.encoders[peer]._errors.get(f"{what}/0", torch.zeros(LENGTH)).clone()

    def reducers(self, world: World, group: Group, order: Sequence[int], vectors: torch.Tensor) -> list[Reducer]:
        return [
            Reducer(world, group, me, vectors[peer], codec="int8", chunk_elements=16, encoder=self.encoders[peer])
            for me, peer in enumerate(order)
        ]

    def commit(self, order: Sequence[int], reducers: Sequence[Reducer]) -> None:
        for peer, reducer in zip(order, reducers, strict=True):
            self.encoders[peer].commit(reducer.round.settled)

    async def average(self, world: World, group: Group, order: Sequence[int], vectors: torch.Tensor) -> list[Reducer]:
        """One round, after which all commit."""
        before = [self.errors(peer) for peer in order]
        reducers = self.reducers(world, group, order, vectors)
        with parts_of(world, group) as sent:
            await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
        assert all(reducer.round.results == reducers[0].round.results for reducer in reducers)
        for number, chunk in enumerate(reducers[0].round.chunks):
            span = slice(chunk.start, chunk.stop)
            total, weight = torch.zeros(chunk.stop - chunk.start, dtype=torch.float64), 0
            for me in counted(reducers[chunk.owner].round, number):
                own = (vectors[order[me]] + before[me])[span]  # which its owner adds up as it is
                part = own if me == chunk.owner else INT8.decode(sent[me, number], len(own))
                self.given[order[me], span] += vectors[order[me], span]
                self.applied[order[me], span] += part
                total += part.double() * group.members[me].weight
                weight += group.members[me].weight
            self.means[span] += total / weight
        self.results += (await reducers[0].round.mean()).double()
        self.commit(order, reducers)
        return reducers


@contextmanager
def parts_of(world: World, group: Group) -> Iterator[dict[tuple[int, int], bytes]]:
    """The parts that pass meanwhile, by member and chunk."""
    sent: dict[tuple[int, int], bytes] = {}

    def note(source: str, _target: str, message: Any) -> None:
        if isinstance(message, pb.ReduceRequest) and message.HasField("chunk"):
            sent[group.peer_ids.index(source), message.chunk.index] = message.chunk.data

    world.on_message = note
    yield sent


def counted(current: AveragingRound, number: int) -> frozenset[int]:
    return from_bits(current._counted[number], len(current.group.members))


def parts_from(peer: str, owner: str, first: int = 0) -> Callable[[str, str, Any], float]:
    """A delay of the parts from chunk ``first`` on that one peer sends to one owner: they come too late."""

    def delay(source: str, target: str, message: Any) -> float:
        is_part = isinstance(message, pb.ReduceRequest) and message.HasField("chunk")
        return LATE_S if is_part and (source, target) == (peer, owner) and message.chunk.index >= first else 0.0

    return delay


def random_vectors(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, LENGTH, generator=torch.Generator().manual_seed(seed))


async def test_what_was_added_up_and_the_errors_are_all_that_was_given_whoever_is_late_or_owns_a_chunk() -> None:
    """Both for the parts and for the means, with other spans in each round."""
    members, shares, rng = Members(4), [1.0, 2.0, 0.5, 1.5], random.Random(0)
    num_left_out = 0
    for step in range(12):
        group, order = group_of(shares, [3, 1, 2, 5], step)
        world = World()
        if step % 3:
            world.delay = parts_from(*rng.sample(group.peer_ids, 2))
        reducers = await members.average(world, group, order, random_vectors(4, step))
        num_left_out += sum(len(counted(reducers[0].round, number)) < 4 for number in reducers[0].round._counted)
    assert num_left_out > 12
    errors = torch.stack([members.errors(peer) for peer in range(4)]).double()
    assert errors.abs().max() > 1e-3
    torch.testing.assert_close(members.applied + errors, members.given, atol=1e-4, rtol=0)
    lost = sum(members.errors(peer, "mean").double() for peer in range(4))
    torch.testing.assert_close(members.results + lost, members.means, atol=1e-4, rtol=0)


async def test_when_another_member_adds_up_a_chunk_again_only_its_errors_are_of_the_mean_that_counts() -> None:
    members, (group, order) = Members(3), group_of([1.0] * 3, [1] * 3)
    await members.average(World(), group, order, random_vectors(3, 0))
    world, vectors = World(), random_vectors(3, 1)
    reducers = members.reducers(world, group, order, vectors)
    before = [members.errors(peer, "mean") for peer in order]
    with parts_of(world, group) as sent:
        await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
        first, first_sent = reducers[0].round.chunks[0], dict(sent)
        assert first.owner == 0
        own = (vectors[order[1]] + members.errors(order[1]))[: first.stop]
        await asyncio.gather(*(reducer.round.repair({}, {0: 1}) for reducer in reducers))
    assert sent[2, 0] == first_sent[2, 0]  # starts from the same errors
    members.commit(order, reducers)
    assert counted(reducers[2].round, 0) == {0, 1, 2}
    assert torch.equal(members.errors(order[0], "mean")[: first.stop], before[0][: first.stop])
    parts = [INT8.decode(sent[0, 0], len(own)), own, INT8.decode(sent[2, 0], len(own))]
    mean = sum(parts) / 3 + before[1][: first.stop]
    result = INT8.decode(reducers[0].round.results[0], len(own))
    torch.testing.assert_close(members.errors(order[1], "mean")[: first.stop], mean - result)
    assert not members.errors(order[1])[: first.stop].any()  # its own part was taken whole


async def test_a_peer_that_gets_a_mean_from_another_member_learns_whether_it_was_counted() -> None:
    members, (group, order) = Members(3), group_of([1.0] * 3, [1] * 3)
    await members.average(World(), group, order, random_vectors(3, 0))
    world = World()
    world.cut.add(frozenset((group.peer_ids[0], group.peer_ids[1])))
    reducers = members.reducers(world, group, order, random_vectors(3, 1))
    before = members.errors(order[1])
    await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
    missing = [number for number, chunk in enumerate(reducers[1].round.chunks) if chunk.owner == 0]
    assert not reducers[1].round.results.keys() & set(missing) and 0 in reducers[1].round.broken
    await reducers[1].round.repair(dict.fromkeys(missing, 2), {})
    assert all(counted(reducers[1].round, number) == {0, 2} for number in missing)
    members.commit(order, reducers)
    is_same = members.errors(order[1]) == before
    own = slice(missing[0] * 16, (missing[-1] + 1) * 16)
    assert bool(is_same[own].all()) and not is_same[2 * LENGTH // 3 :].all()


@pytest.mark.parametrize("error", [PeerError("its handler has failed"), AccessDenied("it takes only members")])
async def test_an_owner_that_fails_in_any_way_does_not_end_the_averaging_of_others(error: SwarmError) -> None:
    members, (group, order) = Members(3), group_of([1.0] * 3, [1] * 3)
    reducers = members.reducers(World(), group, order, random_vectors(3, 0))
    listener, network = reducers[1].round, reducers[1].round._network
    reduce = network.reduce

    @asynccontextmanager
    async def reduce_unless_refused(peer: Progress) -> AsyncIterator[Any]:
        if peer.peer_id == group.peer_ids[0]:
            raise error
        async with reduce(peer) as stream:
            yield stream

    async def refuse(peer: Progress, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]:
        raise error
        yield

    network.reduce = reduce_unless_refused
    await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
    missing = [number for number, chunk in enumerate(listener.chunks) if chunk.owner == 0]
    assert listener.broken == {0} and listener.results.keys() == set(range(len(listener.chunks))) - set(missing)
    fetch, network.fetch = network.fetch, refuse
    await listener.repair(dict.fromkeys(missing, 2), {})
    assert listener.broken == {0, 2}
    network.fetch = fetch
    await listener.repair(dict.fromkeys(missing, 2), {})
    assert listener.is_complete


@pytest.mark.parametrize("told", [b"", b"\xff", b"\0\0"])
async def test_what_an_owner_says_is_checked_and_who_says_nothing_has_counted_all(told: bytes) -> None:
    """An older peer says nothing. Three members take three bits."""
    members, (group, order) = Members(3), group_of([1.0] * 3, [1] * 3)
    world = World()

    def tell(source: str, target: str, message: Any) -> None:
        if isinstance(message, pb.Chunk) and (source, target) == (group.peer_ids[0], group.peer_ids[1]):
            message.counted = told

    world.on_message = tell
    reducers = members.reducers(world, group, order, random_vectors(3, 1))
    await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
    listener = reducers[1].round
    assert listener.broken == ({0} if told else set()) and not reducers[2].round.broken
    if not told:
        assert all(counted(listener, number) == {0, 1, 2} for number in listener.results)


async def test_on_a_grid_all_members_learn_whom_each_row_has_counted() -> None:
    count = 20
    members, (group, order) = Members(count), group_of([1.0] * count, [1] * count)
    assert group.grid
    world = World()
    late, adder = Grid.of(group.layout).rows[1][:2]
    world.delay = parts_from(group.peer_ids[late], group.peer_ids[adder])
    reducers = members.reducers(world, group, order, random_vectors(count, 0))
    await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
    first = reducers[0].round
    assert all(reducer.round._counted == first._counted for reducer in reducers)
    everybody = set(range(count))
    left_out = [number for number in first._counted if counted(first, number) != everybody]
    assert left_out and all(counted(first, number) == everybody - {late} for number in left_out)
    assert len(left_out) < len(first.chunks)


async def test_what_a_grid_loses_at_each_level_is_kept() -> None:
    """The means of three rounds, with what is kept for later ones, are those of the vectors: of rows of three each."""
    members, (group, order) = Members(9), group_of([1.0] * 9, [1] * 9)
    given, received = torch.zeros(2, LENGTH, dtype=torch.float64)
    for seed in range(3):
        vectors = random_vectors(9, seed)
        reducers = members.reducers(World(), replace(group, grid=True), order, vectors)
        await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
        given += vectors.double().mean(0)
        received += (await reducers[0].round.mean()).double()
        members.commit(order, reducers)
    parts, rows, means = (
        torch.stack([members.errors(peer, what) for peer in range(9)]).double().sum(0)
        for what in ("part", "row", "mean")
    )
    assert min(float(each.abs().max()) for each in (parts, rows, means)) > 1e-3
    torch.testing.assert_close(received + parts / 9 + rows / 3 + means, given, atol=1e-5, rtol=0)


async def test_in_a_run_what_a_late_peer_has_lost_before_stays() -> None:
    world = World()
    encoders = [ErrorFeedback(INT8) for _ in range(3)]
    config = replace(CONFIG, codec="int8", straggler_s=2.0)
    peers = []
    for number, encoder in enumerate(encoders):
        peers.append(SimulatedPeer.make(world, number, target=1, config=config, encoder=encoder))
        await peers[-1].enter()
    while any(len(peer.peer.view().all) < 3 for peer in peers):
        await asyncio.sleep(0.1)

    async def step(seed: int) -> None:
        gradients = torch.randn(3, 37, generator=torch.Generator().manual_seed(seed))
        await all_done([peer.spawn(peer.step(gradients[peer.number], 1)) for peer in peers])
        await asyncio.sleep(1.0)

    await step(0)
    before = [encoder._errors["part/0"].clone() for encoder in encoders]
    world.delay = parts_from(peers[1].peer_id, peers[2].peer_id)
    await step(1)
    assert {peer.state.step for peer in peers} == {2} and {peer.groups[2] for peer in peers} == {3}
    assert all(torch.equal(peer.history[2], peers[0].history[2]) for peer in peers)
    (*_, (last,)) = peers[1].peer._averager._rounds._groups.values()
    is_same = encoders[1]._errors["part/0"] == before[1]
    left_out = [chunk for number, chunk in enumerate(last.chunks) if not contains(last._counted[number], last._me)]
    assert 0 < sum(chunk.stop - chunk.start for chunk in left_out) < 37
    for chunk in left_out:
        assert bool(is_same[chunk.start : chunk.stop].all())
    assert not is_same.all() and not torch.equal(encoders[0]._errors["part/0"], before[0])
