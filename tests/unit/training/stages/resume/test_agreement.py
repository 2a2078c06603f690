"""From which checkpoint a run goes on, given what each stage has."""

from __future__ import annotations

from swarm_training.core.record import Kept, Lineage
from swarm_training.stages.resume.agreement import agreed, lacking


def kept(step: int, born: int = 0, rollbacks: int = 0, skipped: int = 0) -> Kept:
    return Kept(step, b"%d/%d" % (born, step), Lineage(born, rollbacks, skipped))


def test_it_is_the_newest_that_every_stage_has() -> None:
    point = agreed([[kept(300), kept(200)], [kept(200), kept(100)]])
    assert point is not None and (point.step, point.rollbacks, point.skipped_batches) == (200, 0, 0)
    assert point.newest_step == 300
    assert point.has(kept(200)) and not point.has(kept(200, born=1)) and not point.has(kept(100))
    assert agreed([[kept(300)], [kept(200)]]) is None
    assert agreed([[kept(300)], []]) is None


def test_states_before_and_after_a_rollback_do_not_belong_together() -> None:
    """After it, the run comes to step 200 with other batches."""
    first = [kept(200), kept(100, rollbacks=1, skipped=51)]  # it has not stepped since
    second = [kept(200, born=1, rollbacks=1, skipped=51), kept(100, rollbacks=1, skipped=51)]
    point = agreed([first, second])
    assert point is not None and (point.step, point.born, point.rollbacks, point.skipped_batches) == (100, 0, 1, 51)


def test_what_was_undone_is_older_even_if_a_stage_was_killed_before_it_knew() -> None:
    """The first stage has gone back to step 100, and has removed what was later; the second stage has a copy."""
    both = [kept(150), kept(100)]
    point = agreed([[*both, kept(100, rollbacks=1, skipped=51)], both])
    assert point is not None and (point.step, point.rollbacks, point.skipped_batches) == (100, 1, 51)
    assert point.newest_step == 100


def test_what_is_missing_is_said() -> None:
    assert lacking([[kept(1)], [], []]) == "nobody has a checkpoint of stage 1, 2 so far"
    said = lacking([[kept(300), kept(200)], [kept(100)]])
    assert said.endswith("equally many rollbacks (stage 0 has those of 300, 200; stage 1 has those of 100)")


def test_checkpoints_of_one_step_are_told_apart_by_the_rollbacks_before_them() -> None:
    said = lacking([[kept(200)], [kept(200, born=1)]])
    assert said.endswith("(stage 0 has those of 200; stage 1 has those of 200 after 1 rollbacks)")
