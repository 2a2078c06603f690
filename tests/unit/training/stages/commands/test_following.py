"""What a peer of a run in stages reports of each step, and the loss curve beside its checkpoints."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_protocol.codecs.bitmap import to_bits
from swarm_protocol.process.routine import end_tasks
from swarm_training.checkpoints.checkpoint import write_losses
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING, HeldOutLoss, Progress
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.losses.curve import LossCurve
from swarm_training.reports.stepping import StepReports
from swarm_training.runfile.reading import parse_run_file
from swarm_training.stages.commands.looking import CurveFiles, StagesFollower, follow_stage, view_of
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.reports.test_reporters import Kept
from tests.unit.training.stages.commands.test_command_line import TEXT

pytestmark = IN_VIRTUAL_TIME

FILE = parse_run_file(TEXT)
SIZE = FILE.stages.num_micro_batches(FILE.run.target_batch_size)
FILE = replace(FILE, run=replace(FILE.run, checkpoint_every=2))
NOTHING = EvaluationHistory()


def stages(step: int, *losses: tuple[float, int], rollbacks: int = 0, **fields: Any) -> list[list[Progress]]:
    """The records of a first stage, and of a last one with a peer for each loss over so many micro-batches."""
    common = {"step": step, "rollbacks": rollbacks, "target_batch_size": SIZE, "micro_batches": to_bits((), SIZE)}
    last = [
        Progress("toy/1", f"Qm{number}", loss=loss, loss_samples=samples, **{**common, **fields})
        for number, (loss, samples) in enumerate(losses)
    ]
    return [[Progress("toy/0", "QmA", **common)], last]


def test_the_loss_of_a_step_is_the_mean_over_its_batch_once_all_records_have_come(tmp_path: Path) -> None:
    place = Kept()
    follower, files = StagesFollower(FILE, StepReports([place]), print), CurveFiles(tmp_path / "new", FILE, print)
    for records in (
        stages(1, (3.0, 1), (0.0, 0)),
        stages(1, (3.0, 1), (1.5, 2)),
        stages(1, (9.0, 1), (9.0, 2), state=MEETING),  # the losses of the step to come
        stages(2, (5.0, 1), (0.0, 0)),
    ):
        follower.see(records, NOTHING)
        files.write_if_due(follower)
    assert not (tmp_path / "new").exists()
    follower.see(stages(2, (5.0, 1), (2.0, 2)), EvaluationHistory.of([HeldOutLoss(Moment(0, 2), 0.5, 4)]))
    files.write_if_due(follower)
    assert LossCurve.parse((tmp_path / "new" / "losses.jsonl").read_text()).series == {
        "training": [(1, 2.0), (2, 3.0)],
        "held out": [(2, 0.5)],
    }
    assert "held out 0.5 at step 2" in (tmp_path / "new" / "loss.svg").read_text()
    follower.see(stages(1, (7.0, SIZE), rollbacks=1), NOTHING)
    assert follower.losses.curve.series == {"training": [(1, 7.0)]}
    reported = [(step, scalars["loss/training"]) for step, scalars in place.added]
    assert reported == [(1, 2.0), (2, 3.0)]


def test_a_peer_with_another_batch_size_does_not_hide_the_run() -> None:
    first, last = stages(1, (3.0, 1))
    size = 8 * SIZE + 8
    other = replace(first[0], peer_id="QmB", target_batch_size=size, micro_batches=to_bits((0, size - 1), size))
    view = view_of("toy", SIZE, [[*first, other], last])
    assert view.step == 1 and view.stages[0].micro_batches == 1


def test_a_curve_that_cannot_be_written_is_said_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    follower = StagesFollower(FILE, None, print)
    follower.see(stages(2, (3.0, SIZE)), NOTHING)
    CurveFiles(tmp_path / "file", FILE, print).write_if_due(follower)
    assert "warning: the loss curve cannot be written to" in capsys.readouterr().out


async def test_a_peer_that_starts_again_goes_on_with_the_losses_on_its_disk_and_leaves_its_curve(
    tmp_path: Path,
) -> None:
    known = EvaluationHistory.of([HeldOutLoss(Moment(0, 2), 0.5, 4), HeldOutLoss(Moment(0, 4), 0.6, 4)])
    write_losses(LossCurve.parse('{"step": 2, "held out": 0.5}\n{"step": 4, "held out": 0.6}\n'), "toy", tmp_path)
    told, looks, seen = list[str](), iter([RuntimeError("once")]), asyncio.Event()

    def records() -> list[list[Progress]]:
        for error in looks:
            raise error
        seen.set()
        return stages(5, (1.5, SIZE))

    evaluation = SimpleNamespace(known=known, reason_of_end="")
    peer: Any = SimpleNamespace(moment=Moment(0, 5), step=5, evaluation=evaluation)
    peer.watch = SimpleNamespace(all_records=records)
    following = asyncio.ensure_future(follow_stage(peer, FILE, None, CurveFiles(tmp_path, FILE, print), told.append))
    await seen.wait()
    await end_tasks([following])
    assert not told
    assert LossCurve.parse((tmp_path / "losses.jsonl").read_text()).series == {
        "training": [(5, 1.5)],
        "held out": [(2, 0.5), (4, 0.6)],
    }


def test_a_loss_on_held_out_data_that_comes_late_is_written_and_takes_no_later_one_away(tmp_path: Path) -> None:
    follower, files = StagesFollower(FILE, None, print), CurveFiles(tmp_path, FILE, print)
    last, older = HeldOutLoss(Moment(0, 4), 0.6, 4), HeldOutLoss(Moment(0, 2), 0.5, 4)
    for known in ([], [last], [older, last]):
        follower.see(stages(4, (3.0, SIZE)), EvaluationHistory.of(known))
        files.write_if_due(follower)
        written = LossCurve.parse((tmp_path / "losses.jsonl").read_text()).series
        assert written.get("held out", []) == [(each.step, each.loss) for each in known]
