"""What peers of a run keep in memory from step to step is what the documentation says, and not more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from transformers import LlamaConfig

from swarm_training.stages.placement.memory import StageNeeds
from tests.marks import SLOW
from tests.unit.held import held_bytes
from tests.worlds.whole_runs import CONFIG, MODEL, WholeRun

LIMIT_S = 300.0
SMALL = 50_000  # bytes of a peer that do not grow with the model, such as records; a sum of gradients has 650 000


@SLOW
async def test_between_steps_a_peer_keeps_what_its_next_step_needs(tmp_path: Path) -> None:
    """Steps, checkpoints and replicas of the stage before leave nothing behind."""
    model = LlamaConfig(**{**MODEL.to_dict(), "hidden_size": 64, "intermediate_size": 256})
    config = replace(CONFIG, checkpoint_directory=tmp_path)
    async with asyncio.timeout(LIMIT_S), WholeRun.running(2, 1, config=config, model=model) as run:
        await run.until(lambda: all(peer.moment is not None for peer in run.peers))
        for step, checkpoint in ((3, 2), (5, 4)):
            training = asyncio.ensure_future(run.train(step, []))
            await run.until(lambda step=step, training=training: training.done() and has_stepped(run, step))
            training.result()
            await run.until(lambda checkpoint=checkpoint: has_replicas(run, checkpoint))
            del training
            run.history.clear()
            trained = sum(peer.stage.num_trained for peer in run.peers)
            expected = StageNeeds(trained, 0, "adamw", "fp64", 0).resting_bytes * trained
            most = expected + SMALL * len(run.peers)
            await run.until(lambda most=most: held_bytes(run) <= most)  # calls that are ending hold their messages
            assert held_bytes(run) >= expected


def has_stepped(run: WholeRun, step: int) -> bool:
    return all(peer.life.step == step and not peer.life._is_averaging for peer in run.peers)


def has_replicas(run: WholeRun, step: int) -> bool:
    found = [peer.life.peer.own.replica for peer in run.peers]
    return all(replica is not None and replica.step == step for replica in found)
