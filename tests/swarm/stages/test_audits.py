"""Peers are processes, one of three at a stage computes wrongly: it is excluded, and the run is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.stages.crew import crew
from tests.swarm.stages.model import write_run
from tests.swarm.stages.test_kills import require_trained_as_one
from tests.swarm.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("lie", "stage"), [("scale", 0), pytest.param("weights", 1, marks=pytest.mark.long)])
def test_a_peer_that_computes_wrongly_is_excluded(tmp_path: Path, lie: str, stage: int) -> None:
    steps = 8
    with crew(write_run(tmp_path, 2, audit_share=1.0), tmp_path) as peers:
        peers.join(0)
        peers.join(1)
        (liar,) = peers.join(stage, lie=lie)
        peers.join(stage)
        trainer = peers.trainer(steps)
        wait_for(lambda: not liar.is_alive, "the liar is excluded")
        assert "is excluded from the run" in liar.stderr
        trainer.reach(steps)
        assert "as 2 of 2 mates have found" in trainer.stderr
        assert all(peer.is_alive for peer in peers.peers if peer is not liar)
        peers.peers.remove(liar)
        require_trained_as_one(peers, tmp_path, steps)
