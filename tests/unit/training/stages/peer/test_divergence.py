"""Runs that have diverged: all stages go back to a checkpoint as one, and no batch since then is seen again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm_training.core.config import RollbackPolicy
from swarm_training.core.moment import Moment
from tests.marks import IN_VIRTUAL_TIME, SLOW
from tests.unit.training.stages.peer.test_simulated_stages import start
from tests.worlds.runs import simulate
from tests.worlds.stages import CONFIG, SimulatedStagePeer, StageWorld, ToyGradients, ToyTrainer, single

pytestmark = IN_VIRTUAL_TIME

STAGES, MICRO_BATCHES = 3, 6
DIVERGES_AT = 5
CHECKPOINT = 4  # every second step is kept
SKIPPED = DIVERGES_AT + 1 - CHECKPOINT
POLICY = RollbackPolicy(margin=5.0, patience=1, window=8, warmup=2)


def require_as_one_process_that_skips(world: StageWorld, steps: int) -> None:
    usual = single(STAGES, MICRO_BATCHES, DIVERGES_AT)
    skips = single(STAGES, MICRO_BATCHES, steps, batch_of=lambda step: step + SKIPPED * (step >= CHECKPOINT))
    compared = 0
    for peer in world.everybody.values():
        for moment, parameters in peer.history.items():
            if moment.step <= steps:
                truth = (skips if moment.rollbacks else usual)[moment.step][peer.stage_peer.index]
                assert all(map(torch.equal, parameters, truth)), (peer.number, moment)
                compared += moment.rollbacks == 1
    assert compared >= 2 * STAGES * (steps - CHECKPOINT)


def spoil(peer: SimulatedStagePeer, after: Callable[[ToyGradients], ToyGradients]) -> None:
    """What this peer of the last stage makes of the batch with which the run diverges."""
    usual = peer.stage.backward

    def backward(inputs: Tensor, grad: Tensor | None) -> ToyGradients:
        found = usual(inputs, grad)
        return after(found) if peer.state.moment == Moment(0, DIVERGES_AT) else found

    peer.stage.backward = backward  # type: ignore[method-assign]


async def train_past(world: StageWorld, step: int) -> None:
    training = asyncio.ensure_future(ToyTrainer(world).run())
    async with asyncio.timeout(600.0):
        while any(peer.state.moment < Moment(1, step) for peer in world.alive()):
            await asyncio.sleep(0.1)
    training.cancel()


async def test_a_loss_that_is_far_too_high_sends_all_stages_back() -> None:
    world = StageWorld(STAGES, MICRO_BATCHES, replace(CONFIG, rollback=POLICY))
    for peer in (await start(world))[-2:]:
        spoil(peer, lambda found: replace(found, loss_sum=100 * (found.loss_sum or 1.0)))
    await train_past(world, 9)
    require_as_one_process_that_skips(world, 9)
    assert {peer.peer.own.skipped_batches for peer in world.alive()} == {SKIPPED}


@pytest.mark.parametrize("also_lost", [0, pytest.param(1, marks=SLOW)])
async def test_two_stages_that_go_back_at_the_same_moment_to_different_checkpoints_end_at_one(also_lost: int) -> None:
    """The last stage has diverged, and another one is stranded, whose newest checkpoint is an older one."""
    world = StageWorld(STAGES, MICRO_BATCHES, replace(CONFIG, rollback=POLICY))
    peers = await start(world)
    for peer in peers[-2:]:
        spoil(peer, lambda found: replace(found, loss_sum=100 * (found.loss_sum or 1.0)))
    training = asyncio.ensure_future(ToyTrainer(world).run())
    while not any(peer.state.moment == Moment(1, CHECKPOINT) for peer in peers[-2:]):
        await asyncio.sleep(0.005)
    for peer in world.alive(also_lost):  # nobody has heard of the rollback so far
        assert peer.state.moment == Moment(0, DIVERGES_AT)
        peer.peer.rollbacks.kept.discard_after(CHECKPOINT - 2)
        await peer.stage_peer._go_back(Moment(1, CHECKPOINT - 2))
    assert {peer.state.moment.step for peer in peers} >= {CHECKPOINT - 2, CHECKPOINT}
    async with asyncio.timeout(300.0):
        while any(peer.state.step < 9 or not peer.state.moment.rollbacks for peer in world.alive()):
            await asyncio.sleep(0.1)
    training.cancel()
    begin, skipped = require_one_history(world)
    assert begin + skipped > DIVERGES_AT, "the batch with which the run has diverged comes again"


def require_one_history(world: StageWorld) -> tuple[int, int]:
    """All stages have come to the same moments, and what they trained on since the last rollback is one training.

    Returns the step to which they went back last, and the batches skipped.
    """
    lives = [{moment.rollbacks for moment in peer.history} for peer in world.alive()]
    newest = max(max(each) for each in lives)
    assert all(newest in each for each in lives)
    (skipped,) = {peer.peer.own.skipped_batches for peer in world.alive()}
    begin = max(min(m.step for m in peer.history if m.rollbacks == newest) for peer in world.alive())
    last = max(m.step for peer in world.alive() for m in peer.history)
    truth = single(STAGES, MICRO_BATCHES, last, batch_of=lambda step: step + skipped * (step >= begin))
    for peer in world.alive():
        for moment, parameters in peer.history.items():
            if moment.rollbacks == newest:
                expected = truth[moment.step][peer.stage_peer.index]
                assert all(map(torch.equal, parameters, expected)), (peer.number, moment, begin, skipped)
    return begin, skipped


@pytest.mark.parametrize("stopped_at", [CHECKPOINT + 1, pytest.param(9, marks=SLOW)])
def test_what_was_skipped_is_skipped_after_all_have_ended_too(stopped_at: int, tmp_path: Path) -> None:
    """At the first, the checkpoint of the time before the rollback is still the newest."""
    disks = [(index, tmp_path / str(index)) for index in range(STAGES)]

    async def life(spoils: bool, until: int) -> StageWorld:
        world = StageWorld(STAGES, MICRO_BATCHES, replace(CONFIG, rollback=POLICY))
        peers = [world.join(index, disk) for index, disk in disks]
        if spoils:
            spoil(peers[-1], lambda found: replace(found, loss_sum=100 * (found.loss_sum or 1.0)))
        await train_past(world, until)
        for peer in peers:
            world.kill(peer.peer_id)
        return world

    simulate(lambda: life(spoils=True, until=stopped_at))
    again = simulate(lambda: life(spoils=False, until=stopped_at + 2))
    newest = 2 * (stopped_at // 2)
    truth = single(STAGES, MICRO_BATCHES, stopped_at + 3, batch_of=lambda step: step + SKIPPED * (step >= CHECKPOINT))
    for peer in again.everybody.values():
        assert min(peer.history) == Moment(2, newest) and peer.peer.own.skipped_batches == SKIPPED
        for moment, parameters in peer.history.items():
            assert all(map(torch.equal, parameters, truth[moment.step][peer.stage_peer.index])), (peer.number, moment)


async def test_what_nobody_can_compute_sends_all_stages_back_a_newcomer_without_checkpoint_too() -> None:
    world = StageWorld(STAGES, MICRO_BATCHES)
    last = (await start(world))[-2:]
    told = count()

    def refuse(found: ToyGradients) -> ToyGradients:
        next(told)
        raise asyncio.CancelledError  # no answer: the trainer's pass has ended

    for peer in last:
        spoil(peer, refuse)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(DIVERGES_AT)
    training.cancel()
    world.kill(last[0].peer_id)
    newcomer = world.join(STAGES - 1)
    while not newcomer.peer.own.state_digest:
        await asyncio.sleep(0.1)
    assert newcomer.peer.own.kept is None
    for peer in world.alive(STAGES - 1):
        assert peer.stage_peer.note_not_finite(DIVERGES_AT)
    await train_past(world, 9)
    require_as_one_process_that_skips(world, 9)


async def test_without_a_checkpoint_nobody_can_go_back() -> None:
    world = StageWorld(1, MICRO_BATCHES, replace(CONFIG, checkpoint_every=0))
    (peer,) = await start(world, per_stage=1)
    assert not peer.stage_peer.note_not_finite(0)
    await asyncio.sleep(10.0)
    assert peer.state.moment == Moment(0, 0)


async def test_who_joins_after_it_skips_as_the_others_do_when_a_stage_is_lost() -> None:
    world = StageWorld(STAGES, MICRO_BATCHES)
    peers = await start(world)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(1)
    skipped = 7  # as after a rollback
    for peer in peers:
        peer.peer.skip_batches(skipped)
    for peer in world.alive(1):
        world.kill(peer.peer_id)
    replacement = world.join(1)
    async with asyncio.timeout(300.0):
        while replacement.peer.own.skipped_batches != skipped:
            await asyncio.sleep(0.1)
    training.cancel()


@pytest.mark.parametrize("skipped", [0, 3])
def test_how_many_batches_were_skipped_is_in_a_record(skipped: int) -> None:
    from swarm_training.core.record import Progress

    record = Progress("toy/0", "p", skipped_batches=skipped)
    assert Progress.from_proto(record.to_proto()).skipped_batches == skipped
