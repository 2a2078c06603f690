"""The real code of many peers in virtual time: who meets whom, and what failures leave behind."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import AsyncIterator, Generator
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_training.compression.power_sgd import PowerSGD
from swarm_training.core.config import TrainingConfig
from swarm_training.core.local_stream import stream_pair
from swarm_training.core.moment import Moment
from swarm_training.core.record import PRESENT
from swarm_training.core.signing import read_signed
from swarm_training.ledger.ledger import UserTotal
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress import policy
from tests.marks import IN_VIRTUAL_TIME, in_tiers
from tests.unit.training.ledger.members import signed_rounds, summed
from tests.worlds.identities import identity
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done, enter_all, require_equal_steps, simulate

pytestmark = IN_VIRTUAL_TIME


def start(peers: list[SimulatedPeer], until_step: int, spread_s: float = 0.2) -> list[asyncio.Task[Any]]:
    """All train, at speeds of their own."""
    return [peer.spawn(peer.train(0.3 + spread_s * (peer.number % 4), 5, until_step)) for peer in peers]


async def test_a_step_is_the_weighted_mean_in_the_order_of_the_members() -> None:
    """Against plain torch, bit for bit."""
    gradients = [torch.randn(37, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    weights = [7, 1, 30]
    peers = await enter_all(World(), 3, target=38)
    before = peers[0].parameter.detach().clone()
    await peers[0].step(gradients[0], weights[0], loss=1.0)
    await peers[1].step(gradients[1], weights[1], loss=2.0)
    await asyncio.sleep(2.0)
    last = [peers[2].spawn(peers[2].step(gradients[2], weights[2], loss=0.5))]
    await asyncio.sleep(0.5)
    losses = 3.0, None
    last += [peer.spawn(peer.step(torch.ones(37), 2, loss)) for peer, loss in zip(peers[:2], losses, strict=True)]
    await all_done(last)
    sums = [gradient * weight for gradient, weight in zip(gradients, weights, strict=True)]
    sums[0] += torch.ones(37) * 2
    sums[1] += torch.ones(37) * 2
    counts = [9, 3, 30]
    numbers = {peer.peer_id: peer.number for peer in peers}
    order = [numbers[peer_id] for peer_id in peers[0].share.last_group]
    assert sorted(order) == [0, 1, 2]
    first, second, third = (sums[number] / counts[number] * float(counts[number]) for number in order)
    expected = torch.nn.Parameter(before)
    optimizer = torch.optim.Adam([expected], lr=0.1)
    expected.grad = (first + second + third) / 42.0
    optimizer.step()
    for peer in peers:
        assert torch.equal(peer.history[1], expected.detach())
        assert peer.share.last_batch_size == sum(counts)
        assert peer.share.last_loss == (7 * 1.0 + 2 * 3.0 + 1 * 2.0 + 30 * 0.5) / 40


@pytest.mark.parametrize("way", ["at once", "delayed", "PowerSGD"])
async def test_the_average_of_all_is_clipped_with_the_same_bits_at_every_peer(way: str) -> None:
    """Not the shares: the second one is large and the first one small. Their sum has rank 2, as PowerSGD here."""
    rows, columns = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(0))
    gradients = [torch.outer(rows[0], columns[0]), 30 * torch.outer(rows[1], columns[1])]
    options: dict[str, Any] = dict(shape=(6, 6), optimizer=torch.optim.SGD, target=1)
    options["config"] = replace(CONFIG, max_norm=2.0, delay=way == "delayed")
    if way == "PowerSGD":
        options["compressor"] = lambda _number: PowerSGD([(6, 6)], 2, "run")
    peers = await enter_all(World(), 2, **options)
    while any(len(peer.peer.view().all) < 2 for peer in peers):
        await asyncio.sleep(0.1)
    before = peers[0].parameter.detach().clone()
    for _ in range(2):
        steps = zip(peers, gradients, (3, 1), strict=True)
        await all_done([peer.spawn(peer.step(gradient, samples)) for peer, gradient, samples in steps])
        await asyncio.sleep(1.0)
    require_equal_steps(peers, 1)
    change = (before - peers[0].history[1]) / 0.1
    assert float(change.norm()) == pytest.approx(2.0, rel=1e-4)
    mean = (3 * gradients[0] + gradients[1]) / 4
    torch.testing.assert_close(change, 2 * mean / mean.norm(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2, *in_tiers(10, 40)[3:]])
@pytest.mark.parametrize("failure", ["kill", "pause", "isolate"])
async def test_survivors_of_a_failure_at_any_message_stay_equal(failure: str, seed: int) -> None:
    rng = random.Random(seed)
    steps = 6
    world = World()
    peers = await enter_all(world, 4, target=60)
    await all_done(start(peers, 1))  # from here on the roster has all four
    victim = rng.choice(peers)
    survivors = [peer for peer in peers if peer is not victim]
    failed = world.fail_at_message(rng.randrange(1, 120), [victim], failure)
    tasks = start(peers, steps)
    await all_done([tasks[peer.number] for peer in (peers if failure == "pause" else survivors)])
    assert failed
    require_equal_steps(peers, steps)
    assert all(size >= 3 for peer in survivors for size in peer.groups.values())
    assert victim.state.step == steps if failure == "pause" else victim.state.step <= steps
    rounds_s = steps * 5.0
    took_s = asyncio.get_running_loop().time()  # virtual
    assert took_s < rounds_s + 2 * CONFIG.straggler_s + CONFIG.silence_s, "more than one deadline was lost"
    if failure != "pause":  # in which the victim may have given to several rounds that it heard nothing of
        await asyncio.sleep(1.0)
        require_credited(peers, victim)


def require_credited(peers: list[SimulatedPeer], victim: SimulatedPeer) -> None:
    """All are credited as they gave, but for a step whose leader failed in the middle of deciding not more than that.
    The victim may have given what it had in hand, too, without having heard that this led to a step."""
    totals = merged(peers, random.Random(0))
    doubtful = set().union(*(peer.continued for peer in peers))
    for peer in peers:
        given, last = sum(peer.given.values()), max(peer.given.values()) if peer is victim else 0
        unsure = sum(peer.given.get(step, 0) for step in doubtful) + last
        most = given + victim.share.samples if peer is victim else given
        assert given - unsure <= totals[peer.peer_id].samples <= most, (peer.number, doubtful)


def merged(peers: list[SimulatedPeer], rng: random.Random) -> dict[str, UserTotal]:
    """The totals of all rounds that they have, in any order."""
    rounds = [data for peer in peers for data in signed_rounds(peer.peer.ledger)]
    rng.shuffle(rounds)
    return summed("toy", peers[0].peer.ledger.limits, None, rounds)


async def test_who_is_silent_is_dropped_before_the_deadline_of_stragglers() -> None:
    config = replace(CONFIG, straggler_s=50.0)
    world = World()
    peers = await enter_all(world, 4, target=40, config=config)
    await all_done(start(peers, 1))
    struck_s: list[float] = []
    loop = asyncio.get_running_loop()

    def strike(source: str, target: str, message: Any) -> None:
        if isinstance(message, pb.ReduceRequest) and source == victim.peer_id and not struck_s:
            world.isolate(victim.peer_id)
            struck_s.append(loop.time())

    leader = policy.leader_of(peers[0].peer.view())
    victim = next(peer for peer in peers if leader is not None and peer.peer_id != leader.peer_id)
    world.on_message = strike
    tasks = start(peers, 2)
    await all_done([tasks[peer.number] for peer in peers if peer is not victim])
    assert struck_s and loop.time() - struck_s[0] < config.silence_s + 2.0
    require_equal_steps(peers, 2)


async def test_a_peer_whose_calls_take_long_is_waited_for() -> None:
    """For longer than ``straggler_s``."""
    *quick, slow = peers = await enter_all(World(), 3, target=200)
    await all_done(start(peers, 1))  # from here on two of them are a quorum
    tasks = [slow.spawn(slow.train(20.0, 1, 2)), *(peer.spawn(peer.train(0.5, 1, 2)) for peer in quick)]
    await all_done(tasks)  # the batch is complete after 50 s, and the slow peer is back after 60
    assert [peer.groups[2] for peer in peers] == [3, 3, 3] and slow.given[2] == 3


@pytest.mark.parametrize("half", [1, 2])
async def test_of_two_parts_of_a_network_at_most_one_goes_on(half: int) -> None:
    world = World()
    peers = await enter_all(world, 4, target=60)
    await all_done(start(peers, 1))
    by_id = sorted(peers, key=lambda peer: peer.peer_id)
    with_first, others = by_id[:half] if half == 2 else by_id[1:], by_id[half:] if half == 2 else by_id[:1]
    world.isolate(*(peer.peer_id for peer in others))
    winning = start(with_first, 4)
    losing = start(others, 4)
    await all_done(winning)
    await asyncio.sleep(60.0)
    assert {peer.state.step for peer in others} == {1}
    world.cut.clear()
    await all_done(losing)
    require_equal_steps(peers, 4)


async def test_a_peer_that_is_alone_for_a_moment_does_not_step_on_its_own_gradients() -> None:
    world = World()
    peers = await enter_all(world, 4, target=20)
    founder, *others = peers
    while len(founder.peer.view().others) < len(others):
        await asyncio.sleep(0.1)
    world.isolate(founder.peer_id)
    task = founder.spawn(founder.train(0.3, 20, 1))
    await asyncio.sleep(20.0)
    assert founder.state.step == 0 and not task.done()
    world.cut.clear()
    await all_done([task, *(peer.spawn(peer.train(0.3, 20, 1)) for peer in others)])
    assert set(founder.groups.values()) == {4}
    require_equal_steps(peers, 1)


def test_a_run_that_has_lost_half_of_its_peers_says_so_and_goes_on_if_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two peers, of whom the one that decides a draw falls silent."""

    async def scenario(presume_gone_s: float) -> int:
        world = World()
        peers = await enter_all(world, 2, target=20, config=replace(CONFIG, presume_gone_s=presume_gone_s))
        await all_done(start(peers, 1))
        first, second = sorted(peers, key=lambda peer: peer.peer_id)
        world.isolate(first.peer_id)
        for task in first.peer._tasks:
            task.cancel()  # the DHT hears nothing of it, either
        task = second.spawn(second.train(0.3, 5, 3))
        await asyncio.wait([task], timeout=200.0)
        return second.state.step

    assert simulate(lambda: scenario(math.inf)) == 1
    assert f"1 of these 2 peers are silent (…{min(identity(n).peer_id for n in (0, 1))[-6:]})" in caplog.text
    assert simulate(lambda: scenario(100.0)) == 3


@pytest.mark.parametrize("lie", ["other", "broken"])
async def test_who_joins_takes_no_state_but_that_of_the_majority(lie: str) -> None:
    world = World()
    peers = await enter_all(world, 4, target=40)
    await all_done(start(peers, 2))
    state = SimulatedPeer.make(World(), 5, target=40).state
    data = b"".join(state.snapshot()[1].parts())
    data = data if lie == "other" else b"x" * len(data)
    asked = []

    async def lying(*_: Any) -> AsyncIterator[pb.StatePart]:
        asked.append(lie)
        shapes, optimizer = state.shapes, state.optimizer_name
        yield pb.StatePart(
            header=pb.StateHeader(
                step=2,
                size_bytes=len(data),
                roster=["x"],
                parameters=shapes,
                optimizer=optimizer,
                common=state.common,
            )
        )
        yield pb.StatePart(data=data)

    for liar in peers[:3]:
        liar.peer._state_server.parts = lying
    joiner, honest = SimulatedPeer.make(world, 4, target=40), peers[3].peer.own.peer_id
    joiner.peer.downloads._rng.shuffle = lambda sources: sources.sort(key=lambda source: source.peer_id == honest)
    await joiner.enter()
    assert len(asked) == 3 and torch.equal(joiner.history[2], peers[3].history[2])
    await all_done(start([*peers, joiner], 3))
    require_equal_steps([*peers, joiner], 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 5}, "parameter 0 is [5] float32 here and [37] float32 in the run: expected the same model"),
        ({"optimizer": torch.optim.SGD}, "the optimizer is SGD here and Adam in the run"),
        ({"target": 41}, "target_batch_size is 41 here and 40 in the run: expected the same"),
        ({"config": {"codec": "int8"}}, "codec is int8 here and fp32 in the run"),
        ({"config": {"aggregation": "centered_clip"}}, "aggregation is centered_clip here and mean in the run"),
        ({"config": {"chunk_elements": 7}}, "chunk_elements is 7 here and 4 in the run"),
        ({"config": {"checkpoint_every": 3, "checkpoints_kept": 9}}, "checkpoint_every is 3 here and 0 in the run"),
    ],
)
async def test_who_joins_with_another_model_or_settings_is_told_what_differs(
    options: dict[str, Any], message: str
) -> None:
    world = World()
    await enter_all(world, 2, target=40)
    config = replace(CONFIG, **options.get("config", {}))
    joiner = SimulatedPeer.make(world, 2, **{"target": 40, **options, "config": config})
    with pytest.raises(ValueError, match=re.escape(message)):
        await joiner.enter()


async def test_a_founder_goes_on_after_all_that_was_before() -> None:
    """So that no moment comes twice in a ledger."""
    world = World()
    founder = SimulatedPeer.make(world, 0, target=40)
    await founder.peer.found(founder.state.digest(), Moment(2, 30))
    assert founder.peer.own.moment == founder.state.moment == Moment(3, 30)
    assert founder.peer.rollbacks.went_back_to == 30


async def test_who_leaves_is_not_waited_for_and_its_samples_are_withdrawn() -> None:
    peers = await enter_all(World(), 3, target=100)
    first, second, leaver = peers
    await leaver.step(torch.ones(37), 60)
    await first.step(torch.ones(37), 30)
    await leaver.peer.leave()
    await asyncio.sleep(1.0)
    await second.step(torch.ones(37), 30)
    assert second.state.step == 0
    began_s = asyncio.get_running_loop().time()
    await all_done([peer.spawn(peer.train(0.1, 20, 1)) for peer in (first, second)])
    assert asyncio.get_running_loop().time() - began_s < 1.0
    assert first.groups == second.groups == {1: 2}


async def test_who_cannot_be_reached_owns_nothing_and_takes_part() -> None:
    world = World()
    peers = [SimulatedPeer.make(world, 0, target=40)]
    await peers[0].enter()
    peers += [
        SimulatedPeer.make(world, number, target=40, config=TrainingConfig(client_mode=True, chunk_elements=4))
        for number in (1, 2)
    ]
    await asyncio.gather(*(peer.enter() for peer in peers[1:]))
    await all_done(start(peers, 4))
    assert {size for peer in peers for size in peer.groups.values()} == {3}
    require_equal_steps(peers, 4)
    hidden = {peer.peer_id for peer in peers[1:]}
    assert not [entry for entry in world.log if entry[2] in hidden and entry[3] in ("open", "join", "exchange")]


class TwoPhases:
    """Averages the halves one after the other; the gradient is both. It counts what it has averaged."""

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.count = state["count"].clone()

    def phases(self, gradient: torch.Tensor) -> Generator[torch.Tensor, torch.Tensor, torch.Tensor]:
        head = yield gradient[:20]
        tail = yield gradient[20:]
        self.count = self.count + 1
        return torch.cat([head, tail])


@pytest.mark.parametrize("seed", [0, 2])
async def test_a_compressor_may_take_several_phases(seed: int) -> None:
    """Also if somebody dies between them."""
    world = World()
    compressors = [TwoPhases() for _ in range(4)]
    peers = await enter_all(world, 4, target=40, compressor=lambda number: compressors[number])
    await all_done(start(peers, 1))
    left = [0]

    def strike(source: str, target: str, message: Any) -> None:
        if isinstance(message, pb.ReduceRequest) and message.open.phase == 1 and source == peers[3].peer_id:
            left[0] += 1
            if left[0] == seed:
                asyncio.get_running_loop().call_soon(world.kill, peers[3].peer_id)

    world.on_message = strike
    tasks = start(peers, 4)
    await all_done(tasks[:3])
    require_equal_steps(peers, 4)
    assert left[0] > 0 and all(size >= 3 for peer in peers[:3] for size in peer.groups.values())
    assert [float(each.count) for each in compressors[:3]] == [4.0] * 3


async def test_a_peer_with_another_state_takes_over_that_of_the_others() -> None:
    peers = await enter_all(World(), 3, target=40)
    await all_done(start(peers, 2))
    odd = peers[1]
    with torch.no_grad():
        odd.parameter += 1.0
    odd.peer._standing.update(state_digest=odd.state.digest())
    odd.peer.gossip.tell(urgent=True)
    await asyncio.sleep(2.0)
    await all_done(start(peers, 4))
    require_equal_steps([peers[0], peers[2]], 4)
    assert torch.equal(odd.history[4], peers[0].history[4])


async def test_who_opens_a_stream_of_parts_and_sends_nothing_is_not_waited_for() -> None:
    (peer,) = await enter_all(World(), 1, target=12)
    _, served = stream_pair(pb.ReduceRequest, pb.Chunk)
    async with asyncio.timeout(10 * CONFIG.silence_s):
        with pytest.raises(TimeoutError):
            await peer.peer.reduce("stranger", served)


async def test_a_peer_whose_departure_is_cancelled_ends_its_tasks() -> None:
    _, peer = await enter_all(World(), 2, target=12)
    peer.peer._standing.update(has_ended=True, step=peer.peer.own.step + 1)
    leaving = asyncio.ensure_future(peer.peer.leave())  # it waits for the other peer, which lacks the last state
    await asyncio.sleep(1.0)
    assert not leaving.done()
    leaving.cancel()
    await asyncio.wait([leaving, *peer.peer._tasks], timeout=1.0)
    assert leaving.cancelled() and all(task.done() for task in peer.peer._tasks)


async def test_who_has_joined_is_seen_on_the_board_as_present_at_once() -> None:
    world = World()
    peers = await enter_all(world, 3, target=12)
    await asyncio.sleep(2.0)  # a record takes half a second to be published
    assert all(read_signed(world.records[peer.peer_id]).state in PRESENT for peer in peers)
