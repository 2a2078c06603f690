"""Whose states make a checkpoint: all of one step, from the majority of each stage."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_training.checkpoints.whole_directory import CannotWrite
from swarm_training.core.moment import Moment
from swarm_training.core.record import Kept, Progress
from swarm_training.runfile.reading import parse_run_file
from swarm_training.stages.commands import collecting
from swarm_training.stages.commands.building import build, stage_source, training_config
from swarm_training.stages.commands.collecting import CollectionPlan, Source, plans, require_new, write
from tests.unit.training.checkpoints import file_size_limit
from tests.unit.training.stages.commands.test_command_line import TEXT

FILE = TEXT.replace("nowhere", DEFAULT_MODEL)


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


def test_peers_that_were_cut_off_come_after_newer_checkpoints() -> None:
    first, last = [peer("a", 9, kept=8), peer("x", 3)], [peer("b", 8, kept=8), peer("y", 3)]
    assert steps(first, last) == [(8, True), (3, False)]


def test_stages_at_different_steps_have_checkpoints_in_common_or_nothing() -> None:
    assert steps([peer("a", 8, kept=4), peer("b", 8, kept=6)], [peer("c", 7, kept=6)]) == [(6, True)]
    assert steps([peer("a", 8, kept=4)], [peer("c", 7, kept=6)]) == []
    assert steps([peer("a", 7)], []) == []


def test_a_step_of_before_a_rollback_is_another_one() -> None:
    assert steps([peer("a", 7, rollbacks=1)], [peer("c", 7)]) == []
    (plan,) = plans([[peer("a", 7, kept=6, rollbacks=1)], [peer("c", 8, kept=6, rollbacks=1)]])
    assert plan.moment == Moment(1, 6)


def test_the_best_step_is_that_of_which_all_stages_keep_the_checkpoint() -> None:
    kept = [replace(peer(name, 7, kept=6), best=Kept(4, name.encode())) for name in "abc"]
    stages = [[kept[0], replace(kept[1], best=Kept(2, b"b"))], [kept[2]]]
    (plan,) = plans(stages, best=True)
    assert plan.moment.step == 4 and [source.digest for source in plan.sources] == [b"a", b"c"]
    assert plans([[kept[0]], [peer("d", 7, kept=4)]], best=True) == []


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


@pytest.mark.parametrize("largest", [4096, None])
def test_nothing_is_left_of_a_checkpoint_for_which_there_is_no_room(tmp_path: Path, largest: int | None) -> None:
    file = parse_run_file(FILE)
    source = stage_source(file)
    states = [build(file, source, index, training_config(file)).state for index in range(2)]
    plan = CollectionPlan(Moment(0, 0), tuple(Source(peer("a", 0), state.digest(), False) for state in states))
    directory, given = tmp_path / "model", {state.digest(): state.snapshot()[1] for state in states}
    refused = nullcontext() if largest is None else pytest.raises(CannotWrite, match="File too large")
    with file_size_limit(largest), refused:
        write(file, source, plan, lambda own, giver: given[giver.digest], directory)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if largest is None else [])


@pytest.mark.parametrize("goes_on", [False, True], ids=["at rest", "goes on"])
def test_a_run_at_rest_is_waited_for_before_an_older_checkpoint_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """The last stage's record of the last step comes after ten looks."""
    taken, looks = [], itertools.count()

    def records() -> list[list[Progress]]:
        look = next(looks)
        first = 8 + look if goes_on else 8
        behind = [peer("x", 3), peer("y", 3)]  # which were cut off and do not know yet
        return [[peer("a", first, kept=4), behind[0]], [peer("b", 8 if look >= 10 else 7, kept=4), behind[1]]]

    async def no_pause(_seconds: float) -> None:
        pass

    monkeypatch.setattr(collecting.asyncio, "sleep", no_pause)
    monkeypatch.setattr(collecting, "write", lambda _file, _source, plan, *_rest: taken.append(plan))
    file = parse_run_file(FILE)
    step = asyncio.run(collecting.collect(file, stage_source(file), records, None, tmp_path / "out"))
    assert (step, [plan.is_kept for plan in taken]) == ((4, [True]) if goes_on else (8, [False]))
