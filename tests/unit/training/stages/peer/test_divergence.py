"""Runs that have diverged: all stages go back to a checkpoint as one, and no batch since then is seen again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm_protocol.errors import PeerMoved
from swarm_training.core.config import RollbackPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.signing import read_signed
from tests.marks import IN_VIRTUAL_TIME, SLOW
from tests.unit.support import until
from tests.unit.training.stages.peer.test_simulated_stages import start
from tests.worlds.runs import simulate
from tests.worlds.stages import CONFIG, SimulatedStagePeer, StageWorld, ToyGradients, ToyTrainer, single

pytestmark = IN_VIRTUAL_TIME

STAGES, MICRO_BATCHES = 2, 4
DIVERGES_AT = 3
CHECKPOINT = 2  # every second step is kept
SKIPPED = DIVERGES_AT + 1 - CHECKPOINT
DIVERGING = replace(CONFIG, rollback=RollbackPolicy(margin=5.0, patience=1, window=8, warmup=2))


def require_one_history(world: StageWorld, since: int | None = None) -> tuple[int, int]:
    """All have had the tensors of one process: before the first rollback, and of one that skips batches after the last.
    ``since``: the step from which on it skips them; None: that to which the run went back last.

    Returns that step, and the number of batches skipped.
    """
    peers = world.alive()
    newest = max(moment.rollbacks for peer in peers for moment in peer.history)
    (skipped,) = {peer.peer.own.skipped_batches for peer in peers}
    if since is None:
        since = max(min(m.step for m in peer.history if m.rollbacks == newest) for peer in peers)
    last = max(moment.step for peer in peers for moment in peer.history)
    usual = single(STAGES, MICRO_BATCHES, DIVERGES_AT)
    skips = single(STAGES, MICRO_BATCHES, last, batch_of=lambda step: step + skipped * (step >= since))
    for peer in peers:
        assert newest in {moment.rollbacks for moment in peer.history}
        for moment, parameters in peer.history.items():
            if moment.rollbacks in (0, newest):
                truth = (skips if moment.rollbacks else usual)[moment.step][peer.stage_peer.index]
                assert all(map(torch.equal, parameters, truth)), (peer.number, moment, since, skipped)
    return since, skipped


def spoil(peer: SimulatedStagePeer, after: Callable[[ToyGradients], ToyGradients]) -> None:
    """What this peer of the last stage makes of the batch with which the run diverges."""
    usual = peer.stage.backward

    def backward(inputs: Tensor, grad: Tensor | None) -> ToyGradients:
        found = usual(inputs, grad)
        return after(found) if peer.state.moment == Moment(0, DIVERGES_AT) else found

    peer.stage.backward = backward  # type: ignore[method-assign]


def far_too_high(found: ToyGradients) -> ToyGradients:
    return replace(found, loss_sum=100 * (found.loss_sum or 1.0))


async def train_past(world: StageWorld, step: int) -> None:
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await until(lambda: all(peer.state.moment >= Moment(1, step) for peer in world.alive()))
    training.cancel()


async def test_two_stages_that_go_back_at_the_same_moment_to_different_checkpoints_end_at_one() -> None:
    """The last stage has diverged, and the other one is stranded, whose newest checkpoint is an older one, also of
    those that others could keep for it."""
    world = StageWorld(STAGES, MICRO_BATCHES, DIVERGING, replicates=False)
    peers = await start(world)
    for peer in peers[-2:]:
        spoil(peer, far_too_high)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    while not any(peer.state.moment == Moment(1, CHECKPOINT) for peer in peers[-2:]):
        await asyncio.sleep(0.005)
    for peer in world.alive(0):  # nobody has heard of the rollback so far
        assert peer.state.moment == Moment(0, DIVERGES_AT)
        peer.peer.rollbacks.kept.discard_after(CHECKPOINT - 2)
        await peer.stage_peer._go_back(Moment(1, CHECKPOINT - 2))
    assert {peer.state.moment.step for peer in peers} >= {CHECKPOINT - 2, CHECKPOINT}
    later = DIVERGES_AT + 2
    await until(lambda: all(peer.state.moment.rollbacks and peer.state.step >= later for peer in world.alive()))
    training.cancel()
    assert require_one_history(world) == (CHECKPOINT - 2, DIVERGES_AT + 1 - (CHECKPOINT - 2))


@pytest.mark.parametrize("stopped_at", [CHECKPOINT + 1, pytest.param(7, marks=SLOW)])
def test_a_loss_that_is_far_too_high_sends_all_stages_back_and_what_was_skipped_stays_so(
    stopped_at: int, tmp_path: Path
) -> None:
    """Also after all have ended. At the first, the checkpoint of the time before the rollback is still the newest."""
    disks = [(index, tmp_path / str(index)) for index in range(STAGES)]

    async def life(spoils: bool, last: int, since: int | None) -> list[SimulatedStagePeer]:
        world = StageWorld(STAGES, MICRO_BATCHES, DIVERGING)
        peers = [world.join(index, disk) for index, disk in disks]
        if spoils:
            spoil(peers[-1], far_too_high)
        await train_past(world, last)
        assert require_one_history(world, since) == (CHECKPOINT, SKIPPED)
        for peer in peers:
            world.kill(peer.peer_id)
        return peers

    simulate(lambda: life(spoils=True, last=stopped_at, since=None))
    for peer in simulate(lambda: life(spoils=False, last=stopped_at + 2, since=CHECKPOINT)):
        assert min(peer.history) == Moment(2, 2 * (stopped_at // 2))


async def test_what_nobody_can_compute_sends_all_stages_back_a_newcomer_without_checkpoint_too() -> None:
    world = StageWorld(STAGES, MICRO_BATCHES)
    last = (await start(world))[-2:]

    def refuse(found: ToyGradients) -> ToyGradients:
        raise asyncio.CancelledError  # no answer: the trainer's pass has ended

    for peer in last:
        spoil(peer, refuse)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(DIVERGES_AT)
    training.cancel()
    world.kill(last[0].peer_id)
    newcomer = world.join(STAGES - 1)
    await until(lambda: newcomer.peer.own.state_digest)
    assert newcomer.peer.own.kept is None
    for peer in world.alive(STAGES - 1):
        with pytest.raises(PeerMoved):
            peer.stage_peer.note_not_finite(DIVERGES_AT - 1)
        assert peer.stage_peer.note_not_finite(DIVERGES_AT)
    await train_past(world, DIVERGES_AT + 2)
    assert require_one_history(world) == (CHECKPOINT, SKIPPED)


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
    for peer in peers:
        peer.peer.skip_batches(7)  # as after a rollback
    for peer in world.alive(1):
        world.kill(peer.peer_id)
    replacement = world.join(1)
    await until(lambda: replacement.peer.own.skipped_batches == 7)
    training.cancel()


async def test_newcomers_that_outnumber_their_mates_skip_as_these_do() -> None:
    world = StageWorld(1, MICRO_BATCHES)
    (founder,) = await start(world, per_stage=1)
    founder.peer.skip_batches(7)
    founder.peer.gossip.publish_soon()

    async def is_published() -> bool:
        return {read_signed(record).skipped_batches for record in await world.board("reader").read()} == {7}

    await until(is_published)
    newcomers = [world.join(0) for _ in range(3)]
    await until(lambda: all(newcomer.peer.own.state_digest for newcomer in newcomers))
    await until(lambda: {newcomer.peer.own.skipped_batches for newcomer in newcomers} == {7})
