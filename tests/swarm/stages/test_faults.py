"""Trainers end, peers are stopped, stages die out, networks are cut: the run is what one process trains."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.network import Network
from tests.swarm.stages.crew import Crew, crew
from tests.swarm.stages.member import PRESUME_GONE_S
from tests.swarm.stages.model import assert_equal, one_process, write_run
from tests.swarm.stages.test_kills import require_trained_as_one
from tests.swarm.waiting import wait_for

pytestmark = pytest.mark.slow
CUT_S = 2 * PRESUME_GONE_S + 1.0
LIMIT_S = 500.0
MICRO_BATCHES = 8  # of a batch


def ledger_of(peers: Crew) -> dict[str, Any]:
    """What ``swarm train ledger --json`` says of the run."""
    start = [sys.executable, "-c", "from swarm_cli.entry import main; main()", "train", "ledger", str(peers.run_file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*start, "--json", "--initial-peers", *peers.addresses]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
        found = ledger_of(peers)
        assert found["run"] == "crew" and found["step"] <= steps and len(found["stages"]) == 2
        for number, stage in enumerate(found["stages"]):
            users = {user["user"]: user["samples"] for user in stage["users"]}
            assert users.keys() <= {peer.peer_id for peer in peers.at(number)} and 0 < stage["rounds"] <= steps
            assert 0 < stage["samples"] == sum(users.values()) <= MICRO_BATCHES * stage["rounds"]
            assert len(users) == 2 or number == stopped_stage
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
