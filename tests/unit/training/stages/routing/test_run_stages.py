"""What records say of a run in stages: who counts as a peer of one."""

from __future__ import annotations

from dataclasses import replace

from swarm_training.core.record import Progress
from swarm_training.stages.routing.run_stages import RunStages

RECORD = Progress("toy/0", "", micro_batches=b"\0", target_batch_size=8)


def present(*records: Progress) -> str:
    return "".join(peer.peer_id for peer in RunStages.of([records]).stages[0])


def test_whom_most_exclude_or_who_trains_another_model_is_none() -> None:
    a, b, c = (replace(RECORD, peer_id=name) for name in "abc")
    assert present(c, a, b) == "abc"
    assert present(a, replace(b, excludes=("a",)), replace(c, excludes=("a",))) == "bc"
    assert present(a, replace(b, excludes=("a",)), c) == "abc"
    assert present(replace(a, excludes=("b", "c")), b, c) == "abc"
    assert present(a, replace(b, model=b"other"), c) == "ac"
    assert present(a, replace(b, micro_batches=b""), c) == "ac"
