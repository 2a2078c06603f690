"""Lightning through a run of one peer, beside stock Lightning: the same weights, whatever the accumulation."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.training.fakes import LocalRun
from tests.unit.training.trainer.test_callback import Model, adamw, rows

lightning = pytest.importorskip(
    "lightning.pytorch", reason='lightning is not installed: pip install "swarm-lm[lightning]"'
)
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision  # noqa: E402

from swarm_training.trainer.lightning_callback import LightningRunCallback, batch_size_of  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    """A module with the optimizers that ``configure`` returns. It keeps the loss of each batch."""

    def __init__(self, model: Model, configure: Any) -> None:
        super().__init__()
        self.model, self.configure, self.losses = model, configure, []

    def configure_optimizers(self) -> Any:
        return self.configure()

    def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
        loss = self.model(**batch)["loss"]
        self.losses.append(loss.item())
        return loss


def fit(module: Module, callbacks: list[Any], count: int = 48, ckpt_path: Path | None = None, **changes: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options: dict[str, Any] = {**quiet, "accelerator": "cpu", "max_steps": 12, **changes}
    trainer = lightning.Trainer(callbacks=callbacks, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(rows(count), batch_size=4), ckpt_path=ckpt_path)
    return trainer


def stock(count: int = 48, **changes: Any) -> Module:
    module = Module(Model(), lambda: adamw(module.model))
    fit(module, [], count, **changes)
    return module


def together(
    target: int,
    count: int = 48,
    max_run_steps: int | None = None,
    max_norm: float = 0.0,
    ends_at: int | None = None,
    **changes: Any,
) -> tuple[Module, LocalRun]:
    model = Model()
    optimizer = adamw(model)
    run = LocalRun(list(model.parameters()), optimizer, target, max_norm=max_norm, ends_at=ends_at)
    callback = LightningRunCallback(run, optimizer, max_run_steps)
    module = Module(model, lambda: callback.optimizers)
    trainer = fit(module, [callback], count, **changes)
    assert trainer.callback_metrics["run_step"] == run.num_steps
    return module, run


def assert_same_weights(one: Module, other: Module) -> None:
    for parameter, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=1e-5)


def test_every_share_a_step() -> None:
    module, run = together(target=4)
    expected = stock()
    assert run.num_steps == 12 and run.shares == [4] * 12
    assert module.losses == pytest.approx(expected.losses, abs=1e-5)
    assert_same_weights(module, expected)
    assert run.last_loss == pytest.approx(module.losses[-1])


def test_gradient_accumulation_is_one_share() -> None:
    module, run = together(target=12, max_steps=4, accumulate_grad_batches=3)
    assert run.shares == [12] * 4 and run.last_loss == pytest.approx(sum(module.losses[-3:]) / 3)
    assert_same_weights(module, stock(max_steps=4, accumulate_grad_batches=3))


def test_a_run_that_accumulates_is_accumulation_with_the_average_clipped() -> None:
    """Three steps of Lightning for a step of the run are stock Lightning's accumulation of three."""
    module, run = together(target=12, max_norm=0.1, gradient_clip_val=0.1)
    assert run.num_steps == 4 and run.shares == [4] * 12
    assert_same_weights(module, stock(max_steps=4, accumulate_grad_batches=3, gradient_clip_val=0.1))


def test_a_short_last_batch_weighs_as_much_as_it_has_and_it_ends_with_the_run() -> None:
    _, run = together(target=10, count=10, max_run_steps=2, max_steps=100)
    assert run.shares == [4, 4, 2, 4, 4, 2] and run.num_steps == 2


def test_it_ends_when_the_run_has_ended_for_all() -> None:
    _, run = together(target=8, ends_at=2, max_steps=100)
    assert run.shares == [4] * 4 and run.num_steps == 2


def test_a_batch_may_be_nested() -> None:
    assert batch_size_of({"names": ["a"], "scale": torch.tensor(1.0), "pair": (torch.zeros(5, 2), None)}) == 5
    with pytest.raises(ValueError, match="a batch is list without tensors: expected count="):
        batch_size_of(["a"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gradient_clip_val": 1.0}, r"gradient_clip_val is 1\.0: expected None or the max_norm of the run"),
        ({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, "clips the average of all peers by its norm"),
    ],
)
def test_what_contradicts_a_run_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        together(target=4, max_norm=0.1, **changes)


@pytest.mark.parametrize("name", ["16-mixed", "16-true"])
def test_fp16_is_refused(name: str) -> None:
    """By a plugin, since Lightning itself takes bf16 for fp16 on a CPU."""
    plugin = MixedPrecision(name, "cpu") if name == "16-mixed" else HalfPrecision(name)
    with pytest.raises(ValueError, match=f"precision is {name}: expected bf16-mixed or 32-true, since fp16 needs a"):
        together(target=4, plugins=[plugin])


def test_a_checkpoint_of_its_own_and_an_optimizer_of_its_own_are_refused(tmp_path: Path) -> None:
    module = Module(Model(), lambda: adamw(module.model))
    fit(module, [], max_steps=1).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="ckpt_path is given: expected to join the run again"):
        together(target=4, ckpt_path=tmp_path / "x.ckpt")
    model = Model()
    callback = LightningRunCallback(LocalRun(list(model.parameters()), adamw(model), 4), adamw(model))
    with pytest.raises(ValueError, match=r"Lightning has an optimizer of its own: expected callback\.optimizers"):
        fit(Module(model, lambda: adamw(model)), [callback])
