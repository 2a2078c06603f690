"""Hugging Face's Trainer in two processes, through a run of real peers."""

from __future__ import annotations

from statistics import mean

from tests.marks import SLOW
from tests.training.processes import volunteers
from tests.training.trainer_volunteer import STEPS


@SLOW
def test_two_trainers_end_with_equal_parameters() -> None:
    with volunteers([{}, {}], program="tests.training.trainer_volunteer") as peers:
        joined = [peer.wait_for("joined")["digest"] for peer in peers]
        assert joined[0] == joined[1]
        for peer in peers:
            peer.go()
        done = [peer.wait_for("done") for peer in peers]
        for peer in peers:
            peer.finish()
        assert done[0]["digest"] == done[1]["digest"] != joined[0]
        for said in done:
            assert said["steps"] == STEPS and said["members"] == 2
            assert mean(said["losses"][-10:]) < 0.5 * mean(said["losses"][:4])
