"""A run in stages in virtual time, beside the same training in one process."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from swarm_protocol.codecs.bitmap import from_bits
from swarm_training.checkpoints.state_file import UnreadableState
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.stages.peer.stage_peer import LOOK_S
from swarm_training.stages.routing.run_stages import RunStages
from tests.marks import IN_VIRTUAL_TIME, SLOW
from tests.unit.support import until
from tests.worlds.stages import CONFIG, SimulatedStagePeer, StageWorld, ToyTrainer, micro_batch, single

pytestmark = IN_VIRTUAL_TIME

STAGES, MICRO_BATCHES = 3, 4
CLIPPED = replace(CONFIG, max_norm=0.1)


def require_equal_to_single(world: StageWorld, steps: int) -> None:
    """Every tensor that any peer has had, at every step."""
    everybody = [*world.everybody.values(), *world.former]
    newest = max(moment.step for peer in everybody for moment in peer.history)
    max_norm = world.config.max_norm
    truth = single(world.num_stages, world.num_micro_batches, newest, world.tied, max_norm=max_norm)
    compared = 0
    for peer in everybody:
        for moment, parameters in peer.history.items():
            for own, expected in zip(parameters, truth[moment.step][peer.stage_peer.index], strict=True):
                assert torch.equal(own, expected), (peer.number, moment)
                compared += 1
    assert newest >= steps and compared >= 2 * world.num_stages * steps


async def start(world: StageWorld, per_stage: int = 2) -> list[SimulatedStagePeer]:
    peers = [world.join(index) for index in range(world.num_stages) for _ in range(per_stage)]
    await world.reach(0)
    while any(not peer.peer.own.state_digest for peer in peers):
        await asyncio.sleep(0.1)
    return peers


async def watch_barrier(world: StageWorld) -> None:
    """Raises AssertionError if somebody steps before every stage has its average."""
    while True:
        newest = max(peer.state.step for peer in world.alive())
        for index in range(world.num_stages):
            stage = [(peer.state.step, bool(peer.peer.own.decided)) for peer in world.alive(index)]
            assert any(step == newest or (step, holds) == (newest - 1, True) for step, holds in stage)
        await asyncio.sleep(0.005)


async def test_without_failures_every_step_is_that_of_one_process() -> None:
    world = StageWorld(STAGES, MICRO_BATCHES)
    await start(world)
    barrier = asyncio.ensure_future(watch_barrier(world))
    await train(world, 3, ToyTrainer(world))
    assert not barrier.done() or barrier.result()
    require_equal_to_single(world, 3)
    for stage in range(STAGES):
        peers = world.alive(stage)
        credited = peers[0].peer.ledger.totals()
        assert credited.keys() == {peer.peer_id for peer in peers}  # each is a user of its own without an organiser
        assert sum(total.samples for total in credited.values()) <= MICRO_BATCHES * peers[0].state.step


async def test_who_hears_of_its_mates_late_does_not_found_the_stage_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DHT answers after the time in which somebody should have been found."""
    world = StageWorld(1, MICRO_BATCHES)
    await start(world)
    late, founded = world.make(0), []
    look = late.peer.look

    async def look_slowly() -> None:
        await asyncio.sleep(LOOK_S + 1)
        await look()

    async def found(*arguments: object, **_options: object) -> None:
        founded.append(arguments)

    monkeypatch.setattr(late.peer, "look", look_slowly)
    monkeypatch.setattr(late.peer, "found", found)
    world.spawn(late)
    while not (late.peer.own.state_digest or founded):
        await asyncio.sleep(0.1)
    assert not founded


async def test_a_run_may_have_one_stage() -> None:
    world = StageWorld(1, MICRO_BATCHES)
    own = [task for peer in (world.join(0), world.join(0)) for task in peer.tasks]
    await train(world, 3, ToyTrainer(world))
    require_equal_to_single(world, 3)
    assert not any(task.done() for task in own)  # nothing to watch is no reason to end


async def train(world: StageWorld, steps: int, *trainers: ToyTrainer) -> None:
    tasks = [asyncio.ensure_future(trainer.run()) for trainer in trainers]
    await world.reach(steps)
    for task in tasks:
        task.cancel()


async def test_who_joins_with_another_batch_is_told() -> None:
    world = StageWorld(1, MICRO_BATCHES)
    await start(world)
    world.num_micro_batches += 1
    with pytest.raises(ValueError, match=f"target_batch_size is {MICRO_BATCHES + 1} here and {MICRO_BATCHES} in the"):
        await world.make(0).stage_peer.join()


async def test_of_two_peers_that_have_the_same_micro_batch_one_gives_it_up() -> None:
    """Two trainers commit it at the same moment, before either peer has heard of the other's."""
    world = StageWorld(1, MICRO_BATCHES)
    lower, higher = sorted(await start(world), key=lambda peer: peer.peer_id)
    await asyncio.sleep(1.0)
    for peer, numbers in ((lower, [0, 1]), (higher, [1, 2])):
        for m in numbers:
            peer.backward(0, m, "one", micro_batch(0, m), None)
            assert await peer.stage_peer.counting.commit(0, m, "one")
    await asyncio.sleep(1.0)
    assert from_bits(lower.peer.own.micro_batches, MICRO_BATCHES) == {0, 1}
    assert from_bits(higher.peer.own.micro_batches, MICRO_BATCHES) == set()
    await train(world, 3, ToyTrainer(world, "one", 1), ToyTrainer(world, "two", 2))
    require_equal_to_single(world, 3)


async def test_tied_parameters_of_the_first_and_the_last_stage_stay_equal() -> None:
    """A number of micro-batches that is a power of two: see ``SharedGradients``."""
    world = StageWorld(3, 4, CLIPPED, tied=True)
    peers = await start(world)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(1)
    world.kill(peers[0].peer_id)
    world.kill(peers[-1].peer_id)
    world.join(0)
    await world.reach(4)
    training.cancel()
    require_equal_to_single(world, 4)
    first, last = (world.alive(index)[0].history[Moment(0, 4)][0] for index in (0, 2))
    assert torch.equal(first, last)


async def test_who_comes_late_to_the_barrier_clips_by_the_same_norm() -> None:
    """One hears of the other stage only when that has stepped, and does not hold the average of this step any more."""
    world = StageWorld(2, MICRO_BATCHES, CLIPPED)
    late, _ = await start(world, per_stage=1)
    seen, late_steps = late.stage_peer.watch.view, set()

    def stages() -> RunStages:
        found = seen()
        there = tuple(peer for peer in found.stages[1] if peer.moment > late.state.moment)
        late_steps.update(late.state.step for _ in there)
        return replace(found, stages=(found.stages[0], there))

    late.stage_peer.watch.view = stages  # type: ignore[method-assign]
    await train(world, 2, ToyTrainer(world))
    assert late_steps >= {0, 1}
    require_equal_to_single(world, 2)


async def test_one_peer_of_four_that_claims_a_later_step_and_skipped_batches_changes_nothing() -> None:
    world = StageWorld(2, MICRO_BATCHES)
    await start(world, per_stage=4)
    liar = max(world.alive(1), key=lambda peer: peer.peer_id)  # not the founder
    for task in liar.tasks:
        task.cancel()
    liar.peer._standing.update(step=9, skipped_batches=900)
    liar.peer.gossip.tell(urgent=True)
    world.everybody.pop(liar.peer_id)  # it takes no part any more, but its records still come
    await until(lambda: all(max(each.step for each in peer.stage_peer.watch.records(1)) == 9 for peer in world.alive()))
    barrier = asyncio.ensure_future(watch_barrier(world))
    await train(world, 3, ToyTrainer(world))
    assert not barrier.done() or barrier.result()
    assert {peer.peer.own.skipped_batches for peer in world.alive()} == {0}
    require_equal_to_single(world, 3)


async def test_a_peer_whose_disk_fails_while_it_takes_over_a_state_ends_rather_than_found_the_stage() -> None:
    world = StageWorld(1, MICRO_BATCHES)
    (founder,) = await start(world, per_stage=1)
    joiner = world.make(0)

    def fails(*_: object) -> None:
        joiner.state.parameters[0].data.zero_()  # a part has been taken over
        raise UnreadableState("the disk has failed")

    joiner.state.load = fails  # type: ignore[method-assign]
    world.spawn(joiner)
    living, _watching = joiner.tasks
    await until(lambda: living.done() or not bool(joiner.state.parameters[0].any()))
    world.kill(founder.peer_id)
    await until(lambda: living.done() or joiner.peer.own.state_digest)
    with pytest.raises(UnreadableState, match="the disk has failed"):
        await living


async def test_who_has_just_joined_and_is_left_behind_goes_on_from_a_checkpoint() -> None:
    """Those who were at its stage have stepped, and died with the only newer state; nobody else has a checkpoint."""
    config = replace(CONFIG, checkpoint_every=4)
    world = StageWorld(3, MICRO_BATCHES, config, replicates=False)
    await start(world)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(5)
    mates = world.alive(1)
    newcomer = world.join(1)
    while newcomer.peer.own.kept is None:
        await asyncio.sleep(0.05)
    assert newcomer.peer.own.kept.step < min(newcomer.history).step  # that of its mates
    world.isolate(newcomer.peer_id)
    left_at = newcomer.state.step
    while any(peer.state.step <= left_at for peer in world.alive() if peer is not newcomer):
        await asyncio.sleep(0.05)
    for peer in mates:
        world.kill(peer.peer_id)
    world.cut.clear()
    await world.reach(left_at + 2)
    training.cancel()
    assert {peer.state.moment.rollbacks for peer in world.alive()} == {1}
    require_equal_to_single(world, left_at + 2)


class Churn:
    """Kills peers of stages that have another one, and lets new ones join.

    Attributes:
        killed: how many.
    """

    def __init__(self, world: StageWorld, seed: int, most_s: float) -> None:
        self._world, self._rng, self._most_s = world, random.Random(seed), most_s
        self.killed = 0

    async def run(self) -> None:
        world, rng = self._world, self._rng
        while True:
            await asyncio.sleep(rng.uniform(0.1, self._most_s))
            spare = [stage for stage in map(self._settled, range(world.num_stages)) if len(stage) > 1]
            if spare:
                world.kill(rng.choice(rng.choice(spare)).peer_id)
                self.killed += 1
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                world.join(min(range(world.num_stages), key=lambda index: len(world.alive(index))))

    def _settled(self, index: int) -> list[SimulatedStagePeer]:
        """Those that any other of the stage could be left with."""
        here = [peer for peer in self._world.alive(index) if peer.peer.own.state_digest]
        newest = max((peer.peer.own.moment for peer in here), default=None)
        return [peer for peer in here if peer.peer.own.moment == newest]


@pytest.mark.parametrize(("steps", "config"), [(8, CONFIG), pytest.param(20, CLIPPED, marks=SLOW)])
async def test_under_kills_every_step_is_that_of_one_process(steps: int, config: TrainingConfig) -> None:
    world = StageWorld(STAGES, MICRO_BATCHES, config)
    await start(world)
    churn = Churn(world, seed=5, most_s=3.0)
    tasks = [asyncio.ensure_future(each.run()) for each in (ToyTrainer(world, seed=5), churn)]
    await world.reach(steps)
    for task in tasks:
        task.cancel()
    require_equal_to_single(world, steps)
    assert churn.killed >= steps // 4
