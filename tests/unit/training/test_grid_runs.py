"""Runs of 17 and more peers, whose groups are on a grid, in virtual time: the mean of all, and of those who survive."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection
from itertools import combinations
from typing import Any

import pytest
import torch

from swarm_training.core.config import TrainingConfig
from swarm_training.pb import training_pb2 as pb
from tests.marks import IN_VIRTUAL_TIME, SLOW, in_tiers
from tests.unit.training.test_simulated_runs import TwoPhases
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done, enter_all, require_equal_steps

pytestmark = IN_VIRTUAL_TIME

COUNT, ROWS = 19, 5
LR = 0.1


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def gradient_of(number: int) -> torch.Tensor:
    return torch.randn(2 * COUNT, generator=torch.Generator().manual_seed(number))


async def train(peer: SimulatedPeer, until_step: int = 1) -> None:
    """With the same gradient in every call."""
    while peer.state.step < until_step:
        await asyncio.sleep(0.3)
        await peer.step(gradient_of(peer.number), 1 + peer.number % 5)


class Meetings:
    """What a world's leaders and owners say.

    Attributes:
        groups, plans: of all meetings.
    """

    def __init__(self, world: World) -> None:
        self.groups: dict[str, pb.Group] = {}
        self.plans: list[pb.Plan] = []
        self.strike: Callable[[str, str, Any], None] = lambda source, target, message: None
        self._world = world
        world.on_message = self._note

    def _note(self, source: str, target: str, message: Any) -> None:
        if isinstance(message, pb.MeetReply) and message.HasField("group"):
            self.groups[message.group.id] = message.group
        if isinstance(message, pb.MeetReply) and message.HasField("plan"):
            self.plans.append(message.plan)
        self.strike(source, target, message)

    @property
    def group(self) -> pb.Group:
        """The only one so far."""
        (group,) = self.groups.values()
        return group

    @property
    def leader(self) -> SimulatedPeer:
        return self._world.peers[self.group.id.split("/")[-2]]

    def victim(self) -> SimulatedPeer:
        """Of the first group somebody in the second column; not who leads, or has founded the run."""
        members = next(iter(self.groups.values())).members[ROWS : ROWS + 2]
        peers = [self._world.peers[pb.Progress.FromString(member.record.progress).peer_id] for member in members]
        return next(peer for peer in peers if peer.number)

    def streams(self, source: str) -> int:
        return sum(entry[1] == source and entry[3] == "open" for entry in self._world.log)


def require_mean(peers: Collection[SimulatedPeer], group: pb.Group, left_out: Collection[SimulatedPeer] = ()) -> None:
    """The first step of all these is by the exact mean over the group; of each element, some may be left out."""
    numbers = {peer.peer_id: peer.number for peer in next(iter(peers)).world.peers.values()}
    weights = {}
    for member in group.members:
        weights[numbers[pb.Progress.FromString(member.record.progress).peer_id]] = member.weight
    candidates = []
    for size in range(len(left_out) + 1):
        for absent in combinations([peer.number for peer in left_out], size):
            present = {number: weight for number, weight in weights.items() if number not in absent}
            total = sum(gradient_of(number).double() * weight for number, weight in present.items())
            candidates.append(total / sum(present.values()))
    for peer in peers:
        found = (peer.history[0] - peer.history[1]).double() / LR
        off = torch.stack([(found - candidate).abs() for candidate in candidates]).amin(0)
        assert float(off.max()) < 3e-5


async def enter(world: World, count: int = COUNT, **options: Any) -> list[SimulatedPeer]:
    peers = await enter_all(world, count, target=3 * count, size=2 * COUNT, optimizer=sgd, **options)
    peers[0].note()
    return peers


def spawn(peers: Collection[SimulatedPeer], until_step: int = 1) -> dict[str, asyncio.Task[Any]]:
    return {peer.peer_id: peer.spawn(train(peer, until_step)) for peer in peers}


@pytest.mark.parametrize(("count", "hidden"), [(16, 0), (17, 0), (19, 6), pytest.param(16, 4, marks=SLOW)])
async def test_from_seventeen_who_can_be_reached_on_groups_are_on_a_grid(count: int, hidden: int) -> None:
    world = World()
    meetings = Meetings(world)
    peers = await enter(world, count)
    nat = TrainingConfig(client_mode=True, chunk_elements=4)
    behind = [
        SimulatedPeer.make(world, number, target=3 * count, size=2 * COUNT, optimizer=sgd, config=nat)
        for number in range(count, count + hidden)
    ]
    await asyncio.gather(*(peer.enter() for peer in behind))
    await all_done(list(spawn([*peers, *behind]).values()))
    group = meetings.group
    assert group.grid is (count >= 17) and len(group.members) == count + hidden
    require_equal_steps([*peers, *behind], 1)
    require_mean([*peers, *behind], group)
    streams = {meetings.streams(peer.peer_id) for peer in peers}
    most = 2 * (math.sqrt(len(group.members)) - 1) + 2
    assert max(streams) <= most if group.grid else streams == {count - 1}
    assert not any(plan.fetch or plan.redo for plan in meetings.plans)


def is_part(message: Any) -> bool:
    return isinstance(message, pb.ReduceRequest) and message.HasField("chunk")


def is_row(message: Any) -> bool:
    return isinstance(message, pb.ReduceRequest) and message.HasField("row")


def is_mean(message: Any) -> bool:
    return isinstance(message, pb.Chunk)


@pytest.mark.parametrize(
    ("kind", "sends", "count", "with_leader"),
    [
        pytest.param(is_part, False, 1, False, id="before it adds up its row"),
        pytest.param(is_part, False, 8, True, id="while it adds up its row, and the leader", marks=SLOW),
        pytest.param(is_row, True, 1, False, id="when it gives a row mean", marks=SLOW),
        pytest.param(is_row, False, 3, False, id="while it adds up rows"),
        pytest.param(is_row, False, 3, True, id="while it adds up rows, and the leader", marks=SLOW),
        pytest.param(is_mean, True, 9, False, id="when it has given some means"),
        pytest.param(is_mean, False, 1, False, id="before it hands means on"),
        pytest.param(is_mean, False, 16, True, id="when it has nearly all means, and the leader", marks=SLOW),
    ],
)
async def test_no_row_is_lost_with_whoever_adds_it_up(
    kind: Callable[[Any], bool], sends: bool, count: int, with_leader: bool
) -> None:
    """Of each element it is the mean of all, or of all but those who have died; and the same bits everywhere."""
    world = World()
    meetings = Meetings(world)
    peers = await enter(world)
    left = [count]
    dying: list[SimulatedPeer] = []

    def strike(source: str, target: str, message: Any) -> None:
        if not dying and meetings.groups:
            victim = meetings.victim()
            dying.extend([victim, meetings.leader] if with_leader else [victim])
        if kind(message) and (source if sends else target) == dying[0].peer_id:
            left[0] -= 1
            for peer in dying if left[0] == 0 else ():
                asyncio.get_running_loop().call_soon(world.kill, peer.peer_id)

    meetings.strike = strike
    await asyncio.gather(*spawn(peers).values(), return_exceptions=True)
    assert left[0] <= 0
    survivors = [peer for peer in peers if peer not in dying]
    assert all(peer.state.step == 1 for peer in survivors)
    require_equal_steps(survivors, 1)
    groups = list(meetings.groups.values())
    assert groups[0].grid and len(groups[0].members) == COUNT
    assert (len(groups) > 1) is with_leader
    require_mean(survivors, groups[-1], left_out=dying)
    assert with_leader or any(plan.redo or plan.fetch for plan in meetings.plans)
    assert asyncio.get_running_loop().time() < 3.0 + 2 * CONFIG.silence_s * with_leader


@pytest.mark.parametrize("seed", in_tiers(5, 20))
@pytest.mark.parametrize("failure", ["kill", "pause", "isolate"])
async def test_survivors_of_any_failures_stay_equal(failure: str, seed: int) -> None:
    """One to three peers fail at once, at any message."""
    rng = random.Random(seed)
    steps = 2
    world = World()
    peers = await enter(world, COUNT + 2)
    await all_done(list(spawn(peers, 1).values()))  # from here on the roster has all
    victims = rng.sample(peers, rng.randrange(1, 4))
    failed = world.fail_at_message(rng.randrange(1, 90 * len(victims)), victims, failure)
    tasks = spawn(peers, steps)
    waited_for = [peer for peer in peers if failure == "pause" or peer not in victims]
    await all_done([tasks[peer.peer_id] for peer in waited_for])
    assert failed
    require_equal_steps(peers, steps)
    assert asyncio.get_running_loop().time() < 5.0 * steps + 3 * CONFIG.straggler_s + CONFIG.silence_s


@pytest.mark.parametrize(("seconds", "is_redone"), [pytest.param(2.0, False, marks=SLOW), (3.5, False), (6.0, True)])
async def test_a_straggler_is_left_out_of_its_row_and_its_row_is_not(seconds: float, is_redone: bool) -> None:
    """Its parts and row means take so long; rows wait for 2.5 s and owners for 5. If its row means come too late, their
    chunks are added up again."""
    world = World()
    meetings = Meetings(world)
    peers = await enter(world)
    straggler = peers[1]
    world.delay = lambda source, _, message: (
        seconds if source == straggler.peer_id and isinstance(message, pb.ReduceRequest) else 0.0
    )
    await all_done(list(spawn(peers).values()))
    require_equal_steps(peers, 1)
    require_mean(peers, meetings.group, left_out=[straggler] if seconds > 2.5 else [])
    if seconds > 2.5:
        with pytest.raises(AssertionError):  # its row has not waited for it
            require_mean(peers, meetings.group)
    assert any(plan.redo for plan in meetings.plans) is is_redone
    assert not any(plan.fetch for plan in meetings.plans) or is_redone
    assert asyncio.get_running_loop().time() < 3.0 + (2 if is_redone else 1) * seconds


async def test_several_phases_go_by_the_grid_though_somebody_dies_between_them() -> None:
    world = World()
    meetings = Meetings(world)
    compressors = [TwoPhases() for _ in range(COUNT)]
    peers = await enter(world, compressor=lambda number: compressors[number])

    def strike(source: str, target: str, message: Any) -> None:
        if isinstance(message, pb.ReduceRequest) and message.open.phase == 1 and not world.dead:
            world.dead.add(meetings.victim().peer_id)
            asyncio.get_running_loop().call_soon(world.kill, meetings.victim().peer_id)

    meetings.strike = strike
    await asyncio.gather(*spawn(peers).values(), return_exceptions=True)
    survivors = [peer for peer in peers if not peer.is_dead]
    assert len(survivors) == COUNT - 1 and all(peer.state.step == 1 for peer in survivors)
    require_equal_steps(survivors, 1)
    require_mean(survivors, meetings.group, left_out=[peer for peer in peers if peer.is_dead])
    assert meetings.group.grid and {float(compressors[peer.number].count) for peer in survivors} == {1.0}
