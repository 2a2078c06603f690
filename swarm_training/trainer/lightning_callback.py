"""``LightningRunCallback``, with which the Trainer of PyTorch Lightning takes part in a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils import _pytree as pytree

from swarm_training.trainer.optimizer import RunOptimizer, RunSchedule

if TYPE_CHECKING:
    from swarm_training.run.training_run import TrainingRun


def batch_size_of(batch: Any) -> int:
    """Return the length of the first tensor in a batch, which may be nested. Raises ValueError if there is none."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError(f"a batch is {type(batch).__name__} without tensors: expected count=, which returns its samples")


class LightningRunCallback(Callback):
    """A callback by which a step of Lightning, with all accumulated batches, is a share of the run's batch.

    ::

        callback = LightningRunCallback(run, optimizer)

        class Module(LightningModule):
            def configure_optimizers(self):
                return callback.optimizers

        Trainer(callbacks=[callback], …).fit(Module(), …)

    Lightning counts its own steps, which ``max_steps`` limits; ``max_run_steps`` limits global steps. Lightning's
    checkpoints have the present model, for use or evaluation. Training continues by joining the run again.
    """

    def __init__(
        self,
        run: TrainingRun,
        optimizer: torch.optim.Optimizer,
        max_run_steps: int | None = None,
        count: Callable[[Any], int] = batch_size_of,
    ) -> None:
        """Prepare for ``run``. ``optimizer``: the optimizer that the run steps. ``count``: returns the number of
        samples in a batch."""
        self._run = run
        self._max_run_steps = max_run_steps
        self._count = count
        self._batch = self._samples = 0  # samples of this batch, and all since the last share
        self._losses = 0.0  # the sum of loss times samples since the last share
        self._optimizer = RunOptimizer(optimizer, self._give_share)
        self._schedule = RunSchedule(self._optimizer, optimizer)

    @property
    def optimizers(self) -> dict[str, Any]:
        """Return the value for ``configure_optimizers`` of the module."""
        return {
            "optimizer": self._optimizer,
            "lr_scheduler": {"scheduler": self._schedule, "interval": "step"},
        }

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check Lightning's settings. Raises ValueError if a setting contradicts how a run trains.

        ``gradient_clip_val`` is set to None: the run clips the average, and not this peer's part of it.
        """
        if stage != "fit":
            return
        if trainer.gradient_clip_val not in (None, 0, self._run.max_norm) or trainer.gradient_clip_algorithm == "value":
            raise ValueError(
                f"gradient_clip_val is {trainer.gradient_clip_val}: expected None or the max_norm of the run, which is "
                f"{self._run.max_norm}, since the run clips the average of all peers by its norm"
            )
        trainer.gradient_clip_val = None
        if trainer.precision in ("16-mixed", "16-true"):
            raise ValueError(
                f"precision is {trainer.precision}: expected bf16-mixed or 32-true, since fp16 needs a scaler, which "
                "drops shares that others count"
            )
        if trainer.world_size > 1:
            raise ValueError(
                f"there are {trainer.world_size} processes: expected one, since it is the run that joins processes"
            )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if Lightning resumes training from its checkpoint."""
        if trainer.training:
            raise ValueError("ckpt_path is given: expected to join the run again, since its peers have its state")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count. Raises ValueError if Lightning has an optimizer of its own."""
        if [id(optimizer) for optimizer in trainer.optimizers] != [id(self._optimizer)]:
            raise ValueError("Lightning has an optimizer of its own: expected callback.optimizers of the module")
        self._batch = self._samples = 0
        self._losses = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = self._count(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Count the batch, and add up its loss, which Lightning has divided by the number of batches that it
        accumulates."""
        self._samples += self._batch
        self._losses += loss.item() * trainer.accumulate_grad_batches * self._batch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log("run_step", float(self._run.num_steps))
        is_over = self._max_run_steps is not None and self._run.num_steps >= self._max_run_steps
        trainer.should_stop = trainer.should_stop or is_over or bool(self._run.reason_of_end)

    def _give_share(self) -> None:
        samples, self._samples = self._samples, 0
        losses, self._losses = self._losses, 0.0
        self._run.step(samples=samples, loss=losses / samples)
