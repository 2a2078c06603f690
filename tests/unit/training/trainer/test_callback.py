"""Trainer through a run of one peer, beside stock Trainer: the same losses, whatever the accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from swarm_training.trainer.callback import TrainingRunCallback
from tests.unit.training.fakes import LocalRun


class Model(nn.Module):
    """Returns a loss, as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layers(x).squeeze(-1)
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


def rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(count, 3, generator=generator)
    return [{"x": x, "labels": x.sum().sin()} for x in xs]


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    defaults: dict[str, Any] = dict(
        output_dir=str(directory),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=5,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        learning_rate=0.05,
        weight_decay=0.0,
        max_steps=12,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    return TrainingArguments(**{**defaults, **changes})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)


def stock(directory: Path, count: int = 48, **changes: Any) -> Trainer:
    model = Model()
    trainer = Trainer(
        model,
        arguments(directory, **changes),
        train_dataset=rows(count),
        eval_dataset=rows(11, 1),
        optimizers=(adamw(model), None),
    )
    trainer.train()
    return trainer


def together(
    directory: Path,
    target: int,
    count: int = 48,
    max_run_steps: int | None = None,
    max_norm: float = 0.0,
    ends_at: int | None = None,
    **changes: Any,
) -> tuple[Trainer, LocalRun]:
    model = Model()
    optimizer = adamw(model)
    run = LocalRun(list(model.parameters()), optimizer, target, max_norm=max_norm, ends_at=ends_at)
    callback = TrainingRunCallback(run, optimizer, max_run_steps)
    trainer = Trainer(
        model,
        arguments(directory, **changes),
        train_dataset=rows(count),
        eval_dataset=rows(11, 1),
        optimizers=callback.optimizers,
        callbacks=[callback],
    )
    trainer.train()
    return trainer, run


def losses(trainer: Trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_weights(one: Trainer, other: Trainer) -> None:
    for parameter, expected in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=1e-5)


def test_every_share_a_step(tmp_path: Path) -> None:
    trainer, run = together(tmp_path, target=4)
    expected = stock(tmp_path)
    assert len(losses(trainer)) == 12 and losses(trainer) == pytest.approx(losses(expected), abs=2e-4)
    assert run.num_steps == 12 and run.shares == [4] * 12
    assert_same_weights(trainer, expected)
    assert losses(trainer, "run_step")[:12] == list(range(1, 13))


def test_gradient_accumulation_is_one_share(tmp_path: Path) -> None:
    trainer, run = together(tmp_path, target=12, gradient_accumulation_steps=3)
    expected = stock(tmp_path, gradient_accumulation_steps=3)
    assert losses(trainer) == pytest.approx(losses(expected), abs=2e-4)
    assert run.shares == [12] * 12
    assert_same_weights(trainer, expected)


@pytest.mark.parametrize("asked", [0.1, 0.0])
def test_the_run_clips_the_average_and_trainer_no_part_of_it(asked: float, tmp_path: Path) -> None:
    trainer, _ = together(tmp_path, target=12, max_steps=36, max_norm=0.1, max_grad_norm=asked)
    expected = stock(tmp_path, gradient_accumulation_steps=3, max_grad_norm=0.1)
    assert_same_weights(trainer, expected)


def test_a_short_last_batch_weighs_as_much_as_it_has(tmp_path: Path) -> None:
    _, run = together(tmp_path, target=10, count=10, max_steps=6)
    assert run.shares == [4, 4, 2, 4, 4, 2] and run.num_steps == 2


def test_evaluations_do_not_count_and_checkpoints_have_the_model(tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=6)
    trainer, run = together(tmp_path / "one", target=4, **changes)
    expected = stock(tmp_path / "other", **changes)
    assert run.shares == [4] * 12
    assert len(losses(trainer, "eval_loss")) == 3
    assert losses(trainer, "eval_loss") == pytest.approx(losses(expected, "eval_loss"), abs=1e-5)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "one" / "checkpoint-12" / "model.safetensors")
    for name, parameter in trainer.model.state_dict().items():
        assert torch.equal(saved[name], parameter)


def test_the_rate_that_is_logged_is_the_runs(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    run = LocalRun(list(model.parameters()), optimizer, 4)
    callback = TrainingRunCallback(run, optimizer)
    trainer = Trainer(
        model,
        arguments(tmp_path, max_steps=2),
        train_dataset=rows(8),
        optimizers=callback.optimizers,
        callbacks=[callback],
    )
    optimizer.param_groups[0]["lr"] = 0.0125
    trainer.train()
    assert run.rates == [0.0125] * 2
    assert losses(trainer, "learning_rate")[-1] == 0.0125


@pytest.mark.parametrize("end", ["max_run_steps", "ends_at"])
def test_it_ends_with_the_run(end: str, tmp_path: Path) -> None:
    trainer, run = together(tmp_path, target=8, **{end: 3})
    assert run.num_steps == 3 and trainer.state.global_step == 6


def test_what_contradicts_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"max_grad_norm is 1\.0: expected 0 or the max_norm of the run, which is 0\.5"
    ):
        together(tmp_path, target=4, max_norm=0.5, max_grad_norm=1.0)
    model = Model()
    scaled = arguments(tmp_path)
    scaled.fp16 = True
    with pytest.raises(ValueError, match="fp16 is on: expected bf16 or neither"):
        TrainingRunCallback(LocalRun(list(model.parameters()), adamw(model), 4), adamw(model)).on_init_end(
            scaled, TrainerState(), TrainerControl()
        )
    optimizer = adamw(model)
    callback = TrainingRunCallback(LocalRun(list(model.parameters()), optimizer, 4), optimizer)
    with pytest.raises(ValueError, match="Trainer has an optimizer of its own"):
        Trainer(model, arguments(tmp_path), train_dataset=rows(8), callbacks=[callback]).train()
    changes: dict[str, Any] = dict(save_strategy="steps", save_steps=6)
    together(tmp_path, target=4, **changes)
    again = TrainingRunCallback(LocalRun(list(model.parameters()), optimizer, 4), optimizer)
    trainer = Trainer(
        model, arguments(tmp_path), train_dataset=rows(48), optimizers=again.optimizers, callbacks=[again]
    )
    with pytest.raises(ValueError, match="resume_from_checkpoint is on"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
