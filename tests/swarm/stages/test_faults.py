"""A peer is stopped and comes back: the run is what one process trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.stages.crew import Crew, crew
from tests.swarm.stages.model import write_run
from tests.swarm.stages.test_kills import require_trained_as_one

pytestmark = pytest.mark.slow
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
