"""Whose states make a checkpoint: all of one step, from the majority of each stage."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm_stages.commands.collecting import CannotWrite, complete, plans, require_new, require_writable
from swarm_stages.engine.export import export
from swarm_stages.engine.settings import Scratch
from swarm_training.core.moment import Moment
from swarm_training.core.record import Kept, Progress
from tests import zoo
from tests.unit.stages.engine import passes


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


def test_a_directory_that_cannot_be_written_is_known_before_the_run(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "model")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match=r"cannot write .*file/model: "):
        require_writable(tmp_path / "file" / "model")


@pytest.mark.parametrize("fits", [False, True])
def test_nothing_is_left_of_a_checkpoint_for_which_there_is_no_room(tmp_path: Path, fits: bool) -> None:
    config = zoo.make_config("llama")
    states = [stage.state() for stage in passes.stages_of(Scratch(config, seed=2), 2)]
    with largest_file(1 << 30 if fits else 4096):
        try:
            with complete(tmp_path / "model") as directory:
                export(states, config, directory)
        except CannotWrite as error:
            assert not fits and "File too large" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if fits else [])


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
