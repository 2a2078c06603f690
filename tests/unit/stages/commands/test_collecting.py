"""Whose states make a checkpoint: all of one step, from the majority of each stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_stages.commands.collecting import plans, require_new
from swarm_training.core.moment import Moment
from swarm_training.core.record import Kept, Progress


def peer(
    name: str, step: int, digest: bytes = b"a", kept: int | None = None, rollbacks: int = 0, address: str = "x:1"
) -> Progress:
    checkpoint = None if kept is None else Kept(kept, b"k")
    return Progress("run", name, step=step, rollbacks=rollbacks, state_digest=digest, kept=checkpoint, address=address)


def steps(*stages: list[Progress], step: int | None = None) -> list[tuple[int, bool]]:
    """Of each plan, and whether it is of checkpoints."""
    return [(plan.moment.step, plan.sources[0].is_kept) for plan in plans(stages, step)]


def test_what_all_stages_have_now_comes_before_their_checkpoints() -> None:
    first, last = [peer("a", 7, kept=4), peer("b", 6, kept=4)], [peer("c", 7, kept=4)]
    assert steps(first, last) == [(7, False), (4, True)]
    assert steps(first, last, step=7) == [(7, False)]
    assert steps(first, last, step=4) == [(4, True)]
    assert steps(first, last, step=6) == []


def test_stages_at_different_steps_have_checkpoints_in_common_or_nothing() -> None:
    assert steps([peer("a", 8, kept=4), peer("b", 8, kept=6)], [peer("c", 7, kept=6)]) == [(6, True)]
    assert steps([peer("a", 8, kept=4)], [peer("c", 7, kept=6)]) == []
    assert steps([peer("a", 7)], []) == []


def test_a_step_of_before_a_rollback_is_another_one() -> None:
    assert steps([peer("a", 7, rollbacks=1)], [peer("c", 7)]) == []
    (plan,) = plans([[peer("a", 7, kept=6, rollbacks=1)], [peer("c", 8, kept=6, rollbacks=1)]])
    assert plan.moment == Moment(1, 6)


def test_the_majority_is_asked_and_nobody_who_cannot_be_called() -> None:
    stage = [peer("a", 7, b"z"), peer("b", 7, b"m"), peer("c", 7, b"m")]
    assert {plan.sources[0].digest for plan in plans([stage])} == {b"m"}
    assert plans([[peer("a", 7, address="")], [peer("b", 7)]]) == []


def test_a_directory_with_files_is_refused(tmp_path: Path) -> None:
    require_new(tmp_path)
    require_new(tmp_path / "none")
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="is not empty: expected a new directory"):
            require_new(place)
