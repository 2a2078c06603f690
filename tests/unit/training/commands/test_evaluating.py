"""Runs with [evaluation]: the loss of held-out data beside one process, the best checkpoint, and the end of a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_protocol.errors import CheckpointError
from swarm_training.checkpoints.evaluations import read_evaluations
from swarm_training.checkpoints.store import CheckpointDirectory
from swarm_training.commands import joining
from swarm_training.commands.building import build_model, build_tokenizer
from swarm_training.commands.checking import not_here
from swarm_training.core.moment import Moment
from swarm_training.core.record import HeldOutLoss
from swarm_training.core_backend import open_run
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.runfile.settings import (
    EvaluationSettings,
    RunFile,
)
from tests.unit.training.commands.one_peer import BLOCK, STEPS, TARGET, joined, prepared, who
from tests.unit.training.fakes import LocalRun

SAMPLES = 7


@pytest.fixture(name="file")
def evaluated_file(file: RunFile, tmp_path: Path) -> RunFile:
    """Run file with held-out data."""
    (tmp_path / "held-out.txt").write_text("\n".join(f"def f_{n}(x): return x + {n}" for n in range(200)))
    evaluation = EvaluationSettings(2, str(tmp_path / "held-out.txt"), SAMPLES)
    return replace(file, run=replace(file.run, checkpoint_every=3, keep=1), evaluation=evaluation)


class EvaluatedRun(LocalRun):
    """Its losses on held-out data become known one step after the step that they belong to."""

    def __init__(self, *arguments: Any, losses: Mapping[int, float], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._held_out = losses

    def step(self, samples: int, loss: float | None = None) -> None:
        super().step(samples, loss)
        known = (step for step in self._held_out if step < self.num_steps)
        self.evaluations = EvaluationHistory.of(HeldOutLoss(Moment(0, step), self._held_out[step], 7) for step in known)


def plain_loss(file: RunFile, parameters: Mapping[str, torch.Tensor]) -> float:
    """What one process computes, of all samples at once."""
    tokenizer = build_tokenizer(file.model)
    model = build_model(file.model, len(tokenizer), BLOCK)
    model.load_state_dict(parameters)
    ids: list[int] = []
    for line in Path(file.evaluation.source).read_text().splitlines():
        ids += [*tokenizer(line, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    tokens = torch.tensor(ids[: SAMPLES * BLOCK]).view(SAMPLES, BLOCK)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        return float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))


def test_the_loss_of_a_run_is_that_of_one_process_with_the_parameters_of_that_step(
    file: RunFile, tmp_path: Path
) -> None:
    file = replace(file, run=replace(file.run, keep=9))
    joining.take_part(prepared(file, said := []), who(), open_run, threading.Event(), said.append)
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    assert checkpoints.steps() == [2, 3, 4, 6]
    found = read_evaluations(tmp_path / "checkpoints", "run").losses
    assert found[-1].step == STEPS, "the last step was not waited for"
    for each in found:
        assert each.samples == SAMPLES
        assert each.loss == pytest.approx(plain_loss(file, checkpoints.read(each.step).parameters), rel=1e-5)
        assert any(line.startswith(f"step {each.step}: loss on held-out data {each.loss:.4f}") for line in said)


def test_the_best_checkpoint_stays_and_is_named(file: RunFile, tmp_path: Path) -> None:
    run = joined(file, said := [], EvaluatedRun, losses={2: 1.0, 4: 2.0})
    assert CheckpointDirectory(tmp_path / "checkpoints").steps() == [2, STEPS]
    best = tmp_path / "checkpoints" / "step-000000002"
    facts = json.loads((tmp_path / "checkpoints" / "evaluations.json").read_text())
    assert facts["best"] == {"step": 2, "loss": 1.0, "checkpoint": best.name}
    assert "step 2: loss on held-out data 1.0000, the lowest so far" in said and run.is_finished
    assert "step 4: loss on held-out data 2.0000" in said
    assert f"the checkpoint with the lowest loss on held-out data is {best}" in said


def test_a_checkpoint_of_each_evaluated_step_is_written_and_replaced_if_it_is_not_the_best(
    file: RunFile, tmp_path: Path
) -> None:
    joined(file, [], EvaluatedRun, losses={2: 3.0, 4: 2.0})
    assert CheckpointDirectory(tmp_path / "checkpoints").steps() == [4, STEPS]


def test_training_ends_with_the_run_and_says_why(file: RunFile) -> None:
    run = joined(file, said := [], EvaluatedRun, losses={2: 1.0}, ends_at=4)
    assert run.num_steps == 4 and run.is_finished and "the run has ended at step 4: it falls no more" in said


def test_a_peer_that_begins_has_losses_that_became_known_after_its_newest_checkpoint(
    file: RunFile, tmp_path: Path
) -> None:
    joined(file, [], EvaluatedRun, losses={2: 1.0, 4: 2.0})
    setup = prepared(file, [])
    run = LocalRun(list(setup.model.parameters()), setup.optimizer, TARGET)
    run.num_steps = 7
    run.evaluations = EvaluationHistory.of(HeldOutLoss(Moment(0, step), float(step), 7) for step in (2, 4, STEPS))
    writing = joining.Writing(setup, print)
    writing.begin(run)
    assert read_evaluations(tmp_path / "checkpoints", "run") == run.evaluations
    writing.after_step(9, 0, {})
    held_out = CheckpointDirectory(tmp_path / "checkpoints").losses().series["held out"]
    assert held_out == [(2, 1.0), (4, 2.0), (STEPS, float(STEPS))]


def test_a_peer_that_starts_again_has_the_losses_that_were_known(file: RunFile, tmp_path: Path) -> None:
    joined(file, [], EvaluatedRun, losses={2: 1.0, 4: 2.0})
    setup = prepared(file, said := [])
    assert setup.evaluation is not None and not setup.evaluation.earlier
    for is_founder in (False, True):
        setup.evaluation.go_on_after(())
        joining.resume(setup, said.append, is_founder)
        assert [(each.step, each.loss) for each in setup.evaluation.earlier] == [(2, 1.0), (4, 2.0)]
    assert not read_evaluations(tmp_path / "checkpoints", "another run").losses
    (tmp_path / "checkpoints" / "evaluations.json").write_text('{"run": "run", "losses": [{"step": -1}]}')
    with pytest.raises(CheckpointError, match=r"evaluations.json has step=-1: expected a whole number"):
        read_evaluations(tmp_path / "checkpoints", "run")
    joining.resume(setup, said.append)
    assert any(line.endswith("the evaluations begin anew") for line in said)


def test_files_on_which_the_run_trains_are_no_held_out_data(file: RunFile, tmp_path: Path) -> None:
    for source in (file.data.source, str(tmp_path)):
        wrong = replace(file, evaluation=replace(file.evaluation, source=source))
        for check in (not_here, lambda wrong: prepared(wrong, [])):
            with pytest.raises(
                ValueError, match=r"\[evaluation\] source = .*texts.txt is among the files of \[data\] too"
            ):
                check(wrong)


def test_held_out_data_that_are_not_there_are_named(file: RunFile, tmp_path: Path) -> None:
    wrong = replace(file, evaluation=replace(file.evaluation, source=str(tmp_path / "nothing.txt")))
    with pytest.raises(ValueError, match=r"\[evaluation\] source = .*nothing.txt': there is no such file"):
        not_here(wrong)
    (tmp_path / "nothing.txt").write_text("x")
    with pytest.raises(ValueError, match=r"the held-out data of \[evaluation\]: the data have .*: expected at least"):
        prepared(wrong, [])
