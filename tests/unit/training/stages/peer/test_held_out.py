"""Evaluations of a run in stages in virtual time, beside the losses of one plain process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarm_training.checkpoints.evaluations import EVALUATIONS, read_evaluations
from swarm_training.core.config import EvaluationPolicy
from swarm_training.core.moment import Moment
from swarm_training.rollback.stored import stage_directory
from swarm_training.stages.routing.run_stages import stage_run
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.stages.peer.test_simulated_stages import require_equal_to_single, start
from tests.worlds.stages import CONFIG, StageWorld, ToyStage, ToyTrainer, held_out_loss, optimizer_of, single

pytestmark = IN_VIRTUAL_TIME

STAGES, MICRO_BATCHES = 2, 4
EVERY = 3  # checkpoints are kept every second step


def evaluated(**numbers: float) -> StageWorld:
    policy = EvaluationPolicy(EVERY, **numbers)  # type: ignore[arg-type]
    return StageWorld(STAGES, MICRO_BATCHES, replace(CONFIG, evaluation=policy, checkpoints_kept=11))


def expected_losses(last: int) -> dict[int, float]:
    truth = single(STAGES, MICRO_BATCHES, last)
    return {step: held_out_loss(truth[step]) for step in range(EVERY, last + 1, EVERY)}


async def test_losses_are_those_of_exactly_that_step_though_an_evaluator_dies_and_a_stage_goes_back() -> None:
    world = evaluated()
    await start(world)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    while not world.begun_evaluations:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    world.kill(world.begun_evaluations[0][1])
    await world.reach(7)
    assert [moment for moment, _ in world.begun_evaluations[:2]] == [Moment(0, EVERY)] * 2
    for peer in world.alive(0):
        world.kill(peer.peer_id)
    world.join(0)
    await world.reach(10)
    training.cancel()
    require_equal_to_single(world, 10)
    expected = expected_losses(9)
    for peer in world.alive():
        found = {each.step: each.loss for each in peer.stage_peer.evaluation.known.losses}
        assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-6)
        assert 9 in found and (len(found) == 3 or peer.stage_peer.index != STAGES - 1)
    assert world.alive(STAGES - 1)[0].peer.own.newest_held_out is not None


async def test_patience_ends_the_run_for_all_stages_at_one_step_and_the_best_checkpoint_stays(tmp_path: Path) -> None:
    """No loss falls by so much as is asked for, so the second evaluation is the last one."""
    world = evaluated(patience=1, least_improvement=100.0)
    peers = [world.join(index, tmp_path / f"{number}") for number, index in enumerate((0, 0, 1, 1))]
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(2 * EVERY + 1)
    await asyncio.sleep(15.0)  # in which nobody takes another step
    late = world.join(0)
    world.kill(peers[1].peer_id)
    peers[1] = world.join(0, tmp_path / "1")
    while not (late.peer.own.state_digest and peers[1].peer.own.state_digest):
        await asyncio.sleep(0.1)
    await asyncio.sleep(5.0)
    training.cancel()
    require_equal_to_single(world, 2 * EVERY + 1)
    expected = expected_losses(2 * EVERY)
    best = min(expected, key=lambda step: expected[step])
    truth = single(STAGES, MICRO_BATCHES, best)[best]
    for number, peer in enumerate(peers):
        index = peer.stage_peer.index
        assert peer.state.moment == Moment(0, 2 * EVERY + 1)
        assert "has not fallen by 100 in 1 evaluations" in peer.stage_peer.evaluation.reason_of_end
        assert peer.peer.own.best is not None and peer.peer.own.best.step == best
        data = peer.peer.rollbacks.kept.read(peer.peer.own.best.state_digest)
        stage = ToyStage(index, STAGES)
        state = type(peer.state)(stage.parameters, optimizer_of(stage))
        assert data is not None
        state.load(Moment(0, best), data)
        assert all(map(torch.equal, stage.parameters, truth[index]))
        directory = stage_directory(tmp_path / f"{number}", index)
        written = read_evaluations(directory, stage_run("toy", index))
        assert written.best is not None and written.best.step == best
        assert f'"checkpoint": "step-{best:09d}.' in (directory / EVALUATIONS).read_text()
