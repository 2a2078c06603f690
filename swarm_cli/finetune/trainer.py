"""Hugging Face's Trainer for the parameters that a client trains, and its callbacks between steps."""

from __future__ import annotations

import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from swarm_client.adapters.trained import restore_trained
from swarm_client.passes.divergence import require_finite
from swarm_protocol.process.signals import HANGUP, all_ending_signals, leave_terminal

if TYPE_CHECKING:
    from swarm_client.adapters.prompts import PromptsMixin


class AdapterTrainer(Trainer):
    """A trainer that saves and loads only the adapter or the prompts, because the rest of the model never changes."""

    model: PromptsMixin
    _is_evaluating = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        directory = output_dir or self.args.output_dir
        assert directory is not None
        self.model.save_pretrained(directory)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        restore_trained(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        restore_trained(self.model, self.state.best_model_checkpoint)

    def save_last_step(self, after_step: RandomState) -> int:
        """Save a checkpoint of the last complete step after a failure in mid-step, unless there is one.

        Parameters that are not finite are not saved. Return the number of the last saved step; 0 if there is none.
        """
        assert self.args.output_dir is not None
        step, (_, saved) = self.state.global_step, last_checkpoint(Path(self.args.output_dir))
        if saved >= step or not all(bool(p.isfinite().all()) for p in self.model.parameters() if p.requires_grad):
            return saved
        if not self._is_evaluating:  # the next step starts from the random numbers as they are after a validation
            after_step.restore()
        self._save_checkpoint(self.model, trial=None)
        return step

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._is_evaluating = True
        metrics = super().evaluate(*args, **kwargs)
        self._is_evaluating = False  # not if that fails, because ``save_last_step`` asks
        return metrics


def last_checkpoint(output: Path) -> tuple[Path | None, int]:
    """Return the newest complete checkpoint, and its step; None and 0 if there is none."""
    steps = {
        int(path.parent.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")): path.parent
        for path in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")  # written last
    }
    step = max(steps, default=0)
    return steps.get(step), step


def misses_evaluation(checkpoint: Path) -> bool:
    """Return whether a validation was due at this checkpoint, but the run failed before it."""
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    due = state.global_step % state.eval_steps == 0 or state.global_step >= state.max_steps
    return due and not any(entry["step"] == state.global_step and "eval_loss" in entry for entry in state.log_history)


class StaysFinite(TrainerCallback):
    """A callback that raises TrainingDiverged after a step that made weights infinite, before the weights are saved."""

    def on_step_end(  # type: ignore[override]  # the Trainer always passes the model
        self, _args: Any, _state: Any, _control: Any, *, model: Any, **_others: Any
    ) -> None:
        require_finite([parameter for parameter in model.parameters() if parameter.requires_grad], "weights")


class Lines(TrainerCallback):
    """A callback that prints a line for each loss, above the progress bar if there is one."""

    def on_log(  # type: ignore[override]  # the Trainer always passes the logs
        self, _args: Any, state: TrainerState, _control: Any, logs: dict[str, Any], **_others: Any
    ) -> None:
        if "eval_loss" in logs:
            tqdm.write(f"step {state.global_step}/{state.max_steps}: validation loss {logs['eval_loss']:.3f}")
        elif "loss" in logs:
            tqdm.write(f"step {state.global_step}/{state.max_steps}: loss {logs['loss']:.3f}")
        sys.stdout.flush()


class Bar(ProgressCallback):
    """The stock progress bar without its lines."""

    def on_log(self, *_args: Any, **_others: Any) -> None:
        pass


class LastStep(TrainerCallback):
    """A callback that validates the last step, whatever its number."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_others: Any) -> TrainerControl:
        is_due = state.global_step >= state.max_steps and args.eval_strategy != "no"
        return replace(control, should_evaluate=True) if is_due else control


class RandomState(TrainerCallback):
    """A callback that keeps the state of the random numbers after each step, so that a step can be repeated."""

    def __init__(self) -> None:
        self.on_step_end()

    def on_step_end(self, *_args: Any, **_others: Any) -> None:
        self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    on_evaluate = on_step_end

    def restore(self) -> None:
        python, numpy, torch_state = self._states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)


class Interrupt(TrainerCallback):
    """A context in which a first Ctrl-C, SIGTERM or SIGHUP ends the run with a checkpoint after the current step.

    A second Ctrl-C or SIGTERM ends the run at once.

    Attributes:
        asked: whether the run was asked to end.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._ask) for number in all_ending_signals()}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if number == HANGUP:
            leave_terminal()
        if self.asked and number == HANGUP:  # a closing terminal may send it twice
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nending after this step, with a checkpoint; once more to end now", file=sys.stderr, flush=True)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_others: Any) -> TrainerControl:
        return replace(control, should_save=True, should_training_stop=True) if self.asked else control

    on_evaluate = on_step_end
