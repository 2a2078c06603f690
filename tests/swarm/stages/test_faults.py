"""Trainers end, peers are stopped, stages die out, networks are cut: the run is what one process trains."""

from __future__ import annotations

import itertools
import re
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.swarm.network import Network
from tests.swarm.stages.crew import StageProcess, crew
from tests.swarm.stages.forker import PRESUME_GONE_S
from tests.swarm.stages.model import assert_equal, one_process, write_run
from tests.swarm.stages.test_kills import require_trained_as_one
from tests.swarm.waiting import wait_for

pytestmark = pytest.mark.slow
CUT_S = 2 * PRESUME_GONE_S + 1.0
LIMIT_S = 500.0
ENDLESS = 10**6


def test_a_killed_trainer_is_followed_by_another(tmp_path: Path) -> None:
    with crew(write_run(tmp_path, 2), tmp_path) as peers:
        peers.join(0)
        peers.join(1)
        first, second = (peers.trainer(ENDLESS) for _ in range(2))
        first.reach(2)
        second.reach(2)  # however long it takes to start
        first.kill()
        second.reach(second.steps[-1] + 2)
        second.kill()
        steps = second.steps[-1] + 4
        third = peers.trainer(steps)
        third.reach(steps, LIMIT_S)
        require_trained_as_one(peers, tmp_path, steps)


@pytest.mark.parametrize("stopped_stage", [pytest.param(0, marks=pytest.mark.long), 1])
def test_without_a_peer_that_is_stopped_the_run_goes_on_and_it_comes_back(tmp_path: Path, stopped_stage: int) -> None:
    """The first of two by id is a quorum by itself: when it is stopped, the run waits until it is presumed gone."""
    steps, meanwhile = 14, 3
    with crew(write_run(tmp_path, 2), tmp_path) as peers:
        peers.join(0)
        peers.join(0, 1, 1)
        trainer = peers.trainer(steps)
        trainer.reach(3)
        stopped = min(peers.at(stopped_stage), key=lambda peer: peer.peer_id)
        stopped.signal(signal.SIGSTOP)
        trainer.reach(trainer.steps[-1] + meanwhile, LIMIT_S)
        stopped.signal(signal.SIGCONT)
        trainer.reach(steps, LIMIT_S)
        stopped.reach(steps)
        assert trainer.steps == sorted(set(trainer.steps))  # nothing was lost
        require_trained_as_one(peers, tmp_path, steps)


def test_a_stage_that_dies_out_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    steps = 12
    with crew(write_run(tmp_path, 3), tmp_path) as peers:
        peers.join(0)
        peers.join(0, 1, 1, 2, 2)
        trainer = peers.trainer(steps)
        trainer.reach(5)
        peers.kill(*peers.at(1))
        newcomers = peers.join(1, 1)
        assert any("goes on from its checkpoint of step" in peer.stderr for peer in newcomers)
        trainer.reach(steps, LIMIT_S)
        steps_told = trainer.steps
        first_again = next(later for step, later in pairwise(steps_told) if later <= step)
        assert first_again % 4 == 1  # the step after a checkpoint
        losses = {}
        for step, loss in re.findall(r"step (\d+): loss ([\d.]+), 8 of 8", "\n".join(trainer.lines)):
            assert losses.setdefault(step, loss) == loss  # those of the steps that were taken twice
        assert len(losses) == steps
        require_trained_as_one(peers, tmp_path, steps)


@pytest.mark.parametrize(
    ("near", "far"), [((0, 0), (1, 1)), ((0, 1), (0, 1))], ids=["a stage is cut off", "mates are cut off"]
)
def test_a_network_that_is_cut_for_a_while(tmp_path: Path, near: tuple[int, ...], far: tuple[int, ...]) -> None:
    steps = 12
    with Network("far") as network, crew(write_run(tmp_path, 2), tmp_path, network) as peers:
        peers.join(near[0])
        started = peers.start(*near[1:]) + peers.start(*far, host="far")
        wait_for(lambda: all(peer.address for peer in started), "all have joined")
        trainer = peers.trainer(steps)
        trainer.reach(3)
        network.cut("far")
        until_s = time.monotonic() + CUT_S
        wait_for(lambda: time.monotonic() > until_s, "the cut is longer than anybody waits for an answer")
        network.mend("far")
        trainer.reach(steps, LIMIT_S)
        directories = (tmp_path / f"export-{number}" for number in itertools.count())
        exported = wait_for(
            lambda: peers.export(found := next(directories)).endswith(f"after step {steps}") and found,
            "both sides know of each other again",
        )
        assert_equal(exported, one_process(peers.run_file, steps)[0])


def test_a_joiner_works_soon(tmp_path: Path) -> None:
    """A step may take less time than the news of the joiner, so it need not work in the next one."""
    steps = 32
    with crew(write_run(tmp_path, 2), tmp_path) as peers:
        peers.join(0)
        peers.join(1)
        trainer = peers.trainer(steps)
        trainer.reach(2)
        trainer.signal(signal.SIGSTOP)  # or all steps may be over before it has joined
        (joiner,) = peers.join(1)
        trainer.signal(signal.SIGCONT)
        wait_for(lambda: joiner.steps[-1:] >= [steps] or _num_worked(joiner), "the joiner works, or the run ends")
        assert _num_worked(joiner), joiner.lines
        trainer.reach(steps, LIMIT_S)
        require_trained_as_one(peers, tmp_path, steps)


def _num_worked(peer: StageProcess) -> int:
    """Return how many micro-batches the peer has added up, in all steps."""
    return sum(int(found[1]) for line in peer.lines if (found := re.match(r"step \d+: (\d+) of", line)))
