"""Peers of all stages are killed as the run goes on: what it has trained is, bit for bit, what one process trains."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.swarm.stages.crew import Crew, Process, StageProcess, crew
from tests.swarm.stages.model import CHECKPOINT_EVERY, assert_equal, one_process, write_run
from tests.swarm.waiting import wait_for

LIMIT_S = 500.0


def kill_and_replace(peers: Crew, trainer: Process, rng: random.Random, steps: int, every: int) -> int:
    """Until the run has taken so many steps, always after some of them. Returns how many were killed.

    Nobody dies who alone has the checkpoint that its stage would go back to: then the run could not go on.
    """
    num_killed = 0
    for step in range(every, steps, every):
        trainer.reach(step)
        victim = wait_for(lambda: _victim(peers, trainer, rng), "a stage has two peers with its checkpoint")
        peers.kill(victim)
        peers.start(victim.stage)
        num_killed += 1
    trainer.reach(steps, LIMIT_S)
    return num_killed


def _victim(peers: Crew, trainer: Process, rng: random.Random) -> StageProcess | None:
    checkpoint = trainer.steps[-1] // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    keepers = [peer for peer in peers.peers if peer.address and (not checkpoint or checkpoint in peer.steps)]
    spare = [
        peer
        for peer in peers.peers
        if peer.address and any(mate.stage == peer.stage and mate is not peer for mate in keepers)
    ]
    return rng.choice(spare) if spare else None


def require_trained_as_one(peers: Crew, directory: Path, steps: int) -> None:
    assert peers.export(directory / "out").endswith(f"after step {steps}")
    assert_equal(directory / "out", one_process(peers.run_file, steps)[0])


@pytest.mark.parametrize(("seed", "steps"), [(1, 8), pytest.param(2, 32, marks=pytest.mark.long)])
def test_four_stages_of_two_peers_of_whom_one_after_the_other_is_killed(tmp_path: Path, seed: int, steps: int) -> None:
    with crew(write_run(tmp_path, 4), tmp_path) as peers:
        peers.join(0)
        peers.join(0, 1, 1, 2, 2, 3, 3)
        trainer = peers.trainer(steps)
        assert kill_and_replace(peers, trainer, random.Random(seed), steps, every=2) == steps // 2 - 1
        require_trained_as_one(peers, tmp_path, steps)
