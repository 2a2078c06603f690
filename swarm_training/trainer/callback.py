"""``TrainingRunCallback``, with which Hugging Face's Trainer takes part in a training run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from swarm_training.trainer.optimizer import RunOptimizer, RunSchedule

if TYPE_CHECKING:
    from swarm_training.run.training_run import TrainingRun


class TrainingRunCallback(TrainerCallback):
    """A callback by which a step of the Trainer, with all accumulated micro-batches, is a share of the run's batch.

    ::

        callback = TrainingRunCallback(run, optimizer)
        Trainer(model, args, optimizers=callback.optimizers, callbacks=[callback], train_dataset=…).train()

    Trainer counts its own steps, which ``max_steps`` limits; ``max_run_steps`` limits global steps. Trainer's
    checkpoints have the present model, for use or evaluation. Training continues by joining the run again.
    """

    def __init__(self, run: TrainingRun, optimizer: torch.optim.Optimizer, max_run_steps: int | None = None) -> None:
        """Prepare for ``run``. ``optimizer``: the optimizer that the run steps."""
        self._run = run
        self._max_run_steps = max_run_steps
        self._samples = 0  # counted since the last share
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        shown = RunOptimizer(optimizer, self._give_share)
        self.optimizers = shown, RunSchedule(shown, optimizer)

    def _give_share(self) -> None:
        samples, self._samples = self._samples, 0
        self._run.step(samples=samples)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Check Trainer's arguments. Raises ValueError if an argument contradicts how a run trains.

        ``max_grad_norm`` is set to 0: the run clips the average, and Trainer must not clip this peer's part of it too.
        """
        if args.max_grad_norm not in (None, 0.0, self._run.max_norm):
            raise ValueError(
                f"max_grad_norm is {args.max_grad_norm}: expected 0 or the max_norm of the run, which is "
                f"{self._run.max_norm}, since the run clips the average of all peers"
            )
        args.max_grad_norm = 0.0
        if args.fp16:
            raise ValueError("fp16 is on: expected bf16 or neither, since a scaler drops shares that others count")

    def on_train_begin(  # type: ignore[override]  # the Trainer always passes the model and the optimizer
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any,
        **others: Any,
    ) -> None:
        """Count samples from now on. Raises ValueError if Trainer has its own optimizer, or resumes its checkpoint."""
        if getattr(optimizer, "optimizer", optimizer) is not self.optimizers[0]:  # accelerate wraps it
            raise ValueError("Trainer has an optimizer of its own: expected optimizers=callback.optimizers")
        if state.global_step:
            raise ValueError(
                "resume_from_checkpoint is on: expected to join the run again, since its peers have its state"
            )
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        assert self._hook is not None
        self._hook.remove()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> TrainerControl:
        is_over = self._max_run_steps is not None and self._run.num_steps >= self._max_run_steps
        return replace(control, should_training_stop=True) if is_over or self._run.reason_of_end else control

    def on_log(  # type: ignore[override]  # the Trainer always passes the logs
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any],
        **others: Any,
    ) -> None:
        for entry in (logs, *state.log_history[-1:]):  # the latter is a copy
            entry["run_step"] = self._run.num_steps

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a batch's samples. An epoch's last batch has fewer samples; evaluation batches do not count."""
        if model.training:
            inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim()]
            self._samples += len(inputs[0])
