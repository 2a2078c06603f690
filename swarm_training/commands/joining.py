"""The command ``swarm train join``, which trains a run's model here until it is stopped, with checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import platformdirs
import torch
from torch import nn

from swarm_models.gpu.devices import best_device, named_device
from swarm_protocol.errors import CheckpointError
from swarm_training.checkpoints.checkpoint import Checkpoint
from swarm_training.checkpoints.evaluations import read_evaluations, write_evaluations
from swarm_training.checkpoints.flat_state import load_optimizer
from swarm_training.checkpoints.model_files import ServableModel, is_servable
from swarm_training.checkpoints.store import CheckpointDirectory, copy_to_hub
from swarm_training.commands.batch_size import BatchSizeLimits, Trial, computing, find_batch_size, free_memory_bytes
from swarm_training.commands.building import (
    build_batches,
    build_held_out,
    build_model,
    build_optimizer,
    build_outer_optimizer,
    build_tokenizer,
    scheduled,
)
from swarm_training.commands.checking import require_held_out
from swarm_training.commands.looking import shown_bans, view_of
from swarm_training.contract.backend import Joining, OpenRun
from swarm_training.core.callbacks import Say
from swarm_training.core.config import EvaluationPolicy
from swarm_training.core.moment import Moment
from swarm_training.data.blocks import BlockBatches
from swarm_training.data.loader import Prefetcher
from swarm_training.data.opening import DataReader
from swarm_training.data.order import DataShard
from swarm_training.data.streaming import StreamBatches
from swarm_training.evaluation.evaluation import Evaluation
from swarm_training.evaluation.known_losses import KnownLosses
from swarm_training.evaluation.policy import EvaluationHistory, steps_to_keep
from swarm_training.losses.curve import LossCurve
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.optim.weight_average import averaged_tensors
from swarm_training.reports.observing import RunObserver
from swarm_training.reports.stepping import StepReports
from swarm_training.runfile.memory import listed, mib, room_for_activations, total, volunteer_parts
from swarm_training.runfile.settings import RunFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swarm_training.run.training_run import TrainingRun


@dataclass(frozen=True)
class TrainingSetup:
    """The model that is trained here, with its run file, optimizers and batches."""

    file: RunFile
    model: nn.Module
    optimizer: torch.optim.Optimizer  # the optimizer of global steps, whose state all peers share
    batches: BlockBatches | StreamBatches
    local: LocalSteps | None = None  # the steps between them; None: there are none
    # The model's tokenizer, whose files are in checkpoints; None: they are not.
    tokenizer: PreTrainedTokenizerBase | None = None
    evaluation: Evaluation | None = None  # the evaluation on held-out data; None: there is none
    reports: StepReports | None = None  # where the numbers of each step go; None: nowhere


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the samples, a scalar. ``tokens``: [batch, block_length]."""
    tokens = tokens.to(next(model.parameters()).device)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


class Writing:
    """The writer of checkpoints when they are due, and of their copies on the hub. The run goes on if writing fails."""

    def __init__(self, trained: TrainingSetup, say: Say) -> None:
        settings = trained.file.run
        directory = Path(settings.checkpoints) if settings.checkpoints else None
        self._directory = CheckpointDirectory(directory, settings.keep) if directory else None
        self._trained = trained
        self._say = say
        self._policy = EvaluationPolicy() if trained.evaluation is None else trained.evaluation.policy
        self._losses = KnownLosses(say)

    def begin(self, run: TrainingRun, is_own: bool = True, is_founder: bool = True) -> None:
        """Remove the checkpoints from which the run does not go on: discard those that a rollback has undone, and
        rename those of steps that the run has not reached. The losses go on from there. ``is_own``: whether the run has
        begun with the newest one here; if not, ``is_founder``: whether it has begun here, with that of another peer."""
        curve = LossCurve() if self._directory is None else self._directory.losses()
        self._losses.begin(curve, run.num_steps, run.evaluations)
        if self._directory is None:
            return
        if self._policy.every:
            self._write_evaluations(self._directory)
        if is_own:  # the others are older
            self._directory.discard_after(run.num_steps)
            return
        if unused := self._directory.set_aside_after(run.num_steps):
            self._say(
                f"the run is at step {run.num_steps}, and goes on without the newer checkpoints here: the newest is "
                f"{unused[-1]} now; to go on from that, stop all peers, rename it back, and found the run here"
            )
        if not is_founder:  # a founder keeps its own, as the newest one may be on the disk of one other peer alone
            best = run.evaluations.best
            self._directory.discard_undone(run.num_rollbacks, run.went_back_to, None if best is None else best.moment)

    def went_back(self, step: int | None) -> None:
        """Discard the checkpoints and losses of later steps, which the rollback has undone. None: there were several
        rollbacks, and nobody here knows how far back the earlier ones went. So all checkpoints are renamed."""
        self._losses.curve.discard_after(step or 0)
        if self._directory is None:
            return
        if step is not None:
            self._directory.discard_after(step)
        elif unused := self._directory.set_aside_after(0):
            self._say(
                f"the run has gone back several times, which may have undone any checkpoint here: the newest is "
                f"{unused[-1]} now"
            )

    def after_step(self, step: int, rollbacks: int, data: dict[str, object], loss: float | None = None) -> None:
        """Write a checkpoint if one is due, or the step is evaluated. ``data``: the state of the batches. ``loss``: the
        loss of the step."""
        self._losses.stepped(step, loss)
        file, every = self._trained.file, self._policy.every
        is_due = step % file.run.checkpoint_every == 0
        if self._directory is None or not (is_due or (every and step % every == 0)):
            return
        model = self._trained.model
        content = Checkpoint(
            file.run.name,
            step,
            model.state_dict(),
            self._trained.optimizer.state_dict(),
            data=data,
            config=asdict(file),
            rollbacks=rollbacks,
            trained=tuple(name for name, each in model.named_parameters() if each.requires_grad),
            losses=self._losses.curve,
        )
        averaged = averaged_tensors(self._trained.optimizer, model)
        servable = ServableModel(model, self._trained.tokenizer, averaged) if is_servable(model) else None
        try:
            spared = steps_to_keep(self._policy, self._losses.held_out, step)
            path = self._directory.write(content, servable, spared)
            if file.run.hub and is_due:
                copy_to_hub(file.run.hub, path, content)
        except (ValueError, CheckpointError) as error:
            self._say(f"warning: {error}")

    def after_evaluations(self, known: EvaluationHistory) -> None:
        """Say which losses on held-out data have become known, and write down which checkpoint is the best one."""
        if self._losses.evaluated(known) and self._directory is not None:
            self._write_evaluations(self._directory)

    def _write_evaluations(self, store: CheckpointDirectory) -> None:
        best = self.best_checkpoint()
        name = None if best is None else best.name
        try:
            write_evaluations(store.directory, self._trained.file.run.name, self._losses.held_out, name)
        except ValueError as error:
            self._say(f"warning: {error}")

    def best_checkpoint(self) -> Path | None:
        """Return the checkpoint here with the lowest loss on held-out data; None if it is not here."""
        best = self._losses.held_out.best
        if self._directory is None or best is None or best.step not in self._directory.steps():
            return None
        return self._directory.path(best.step)


def _report(trained: TrainingSetup, run: TrainingRun, observer: RunObserver) -> None:
    """Report the step that the run has taken."""
    if trained.reports is None:
        return
    file = trained.file
    bans, most = shown_bans(run.bans), file.averaging.max_samples
    view = view_of(file.run.name, file.run.target_batch_size, tuple(run.records), bans, most)
    trained.reports.report(observer.complete(replace(view, loss=run.last_loss), time.time()))


def train(trained: TrainingSetup, run: TrainingRun, writing: Writing, stopping: threading.Event, say: Say) -> None:
    """Train until ``stopping`` is set, or the schedule is at its end, or the run ends since the loss on held-out data
    falls no more. ``writing`` has begun; the caller closes the run.

    The learning rate is set when the run steps, from the number of that global step: a share can complete several
    steps. Local steps have the rate of the global step to which they lead, so that all peers have the same. When the
    run goes back to a checkpoint, the data go on: no batch is seen again.
    """
    settings = trained.file.optimizer
    observer = RunObserver(settings.rate, trained.file.run.checkpoint_every)
    end, optimizer = settings.total_steps, trained.optimizer if trained.local is None else trained.local.inner
    with Prefetcher(trained.batches) as loader, scheduled(optimizer, settings.rate, lambda: run.num_steps):
        while not stopping.is_set() and not run.reason_of_end and not (end and run.num_steps >= end):
            step, rollbacks = run.num_steps, run.num_rollbacks
            tokens = loader.next_batch()
            loss = loss_of(trained.model, tokens)
            loss.backward()
            run.step(samples=len(tokens), loss=loss.item())
            if run.num_rollbacks > rollbacks:
                kept_up_to = run.went_back_to if run.num_rollbacks == rollbacks + 1 else None
                say(f"the run has gone back to step {run.went_back_to}")
                writing.went_back(kept_up_to)
            elif run.num_steps > step:
                say(f"step {run.num_steps}: loss {loss.item():.3f}")
                _report(trained, run, observer)
                with run.shared_parameters():
                    writing.after_step(run.num_steps, run.num_rollbacks, loader.state_dict(), run.last_loss)
            if trained.evaluation is not None:
                writing.after_evaluations(run.evaluations)
    if trained.evaluation is not None and not stopping.is_set():
        _end(run, writing, say)


def _end(run: TrainingRun, writing: Writing, say: Say) -> None:
    """Wait for the last loss on held-out data, and say why the run has ended, and which checkpoint is the best one."""
    run.finish()
    writing.after_evaluations(run.evaluations)
    if reason := run.reason_of_end:
        say(f"the run has ended at step {run.num_steps}: {reason}")
    if (best := writing.best_checkpoint()) is not None:
        say(f"the checkpoint with the lowest loss on held-out data is {best}")


def build_evaluation(
    file: RunFile, model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> Evaluation | None:
    """Return the evaluation on held-out data; None if the run file has none. Raises ValueError if there are no such
    data."""
    settings = file.evaluation
    if not settings.every:
        return None
    require_held_out(file)
    samples = build_held_out(settings, file.data.block_length, tokenizer)

    def losses(copy: nn.Module) -> Iterator[tuple[torch.Tensor, int]]:
        for numbers in np.array_split(np.arange(len(samples)), -(-len(samples) // batch_size)):
            yield loss_of(copy, samples.rows(numbers)), len(numbers)

    return Evaluation(
        model,
        losses,
        every=settings.every,
        patience=settings.patience,
        least_improvement=settings.least_improvement,
    )


def fitting_batch_size(file: RunFile, model: nn.Module, room_bytes: int | None = None) -> int:
    """Return the run file's batch size, or else what fits this machine. ``room_bytes``: the memory for activations,
    beside that for gradients; None: what is free is for both.

    Raises ValueError if the batch size, or one sample, does not fit."""
    size = file.batch.size
    if size and room_bytes is None:
        return size
    device = next(model.parameters()).device

    def loss(batch_size: int) -> torch.Tensor:
        return loss_of(model, torch.zeros(batch_size, file.data.block_length, dtype=torch.int64))

    measured, costs = computing(model, loss), dict[int, int]()
    gradients = sum(each.nbytes for each in model.parameters() if each.requires_grad)

    def compute(batch_size: int) -> Trial:
        trial = measured(batch_size)
        if room_bytes is not None:
            trial = replace(trial, memory_bytes=max(0, trial.memory_bytes - gradients))
        costs[batch_size] = trial.memory_bytes
        return trial

    if size:
        compute(size)
    else:
        most = min(file.batch.max_size, file.local.batch_size or file.run.target_batch_size)
        room = free_memory_bytes(device) if room_bytes is None else room_bytes
        size = find_batch_size(compute, BatchSizeLimits(most, memory_bytes=room))
    if room_bytes is not None and costs[size] > room_bytes:
        raise ValueError(
            f"--memory leaves {mib(room_bytes)} for activations, and those of {size} samples at once take "
            f"{mib(costs[size])}: expected more memory, --batch-size auto, or a smaller block_length"
        )
    return size


def prepare(
    file: RunFile, who: Joining, part: DataShard | None, device: str, say: Say, memory_bytes: int | None = None
) -> TrainingSetup:
    """Build everything before any peer is called. ``memory_bytes``: the memory that the process may take; None: what
    is free. Raises ValueError if there is no such model, no such data, or too little memory."""
    if device == "auto":
        device = best_device()
    named = named_device(device)
    tokenizer = build_tokenizer(file.model)
    model = build_model(file.model, len(tokenizer), file.data.block_length).to(named)
    parts = volunteer_parts(file, model)
    room_bytes = None if memory_bytes is None else room_for_activations(parts, memory_bytes)
    batch_size = fitting_batch_size(file, model, room_bytes)
    say(f"{batch_size} samples at once on {device}")
    say(f"memory up to {mib(total(parts))} and activations: {listed(parts)}")
    reader = DataReader(file.run.name, who.identity.peer_id, part)
    cache = platformdirs.user_cache_path("swarm") / "tokens"
    batches = build_batches(file.data, reader, tokenizer, batch_size, cache)
    evaluation = build_evaluation(file, model, tokenizer, batch_size)
    optimizer = build_optimizer(file.optimizer, model)
    if not file.local.batch_size:
        return TrainingSetup(file, model, optimizer, batches, tokenizer=tokenizer, evaluation=evaluation)
    local = LocalSteps(optimizer, file.local.batch_size)
    outer = build_outer_optimizer(file.local, model.parameters())
    return TrainingSetup(file, model, outer, batches, local, tokenizer, evaluation)


def resume(trained: TrainingSetup, say: Say, is_founder: bool = True) -> Moment | None:
    """Load model, optimizer and data of the newest intact checkpoint here, and return its moment; None: there is none.

    The founder goes on from there. A peer that joins needs no checkpoint; it offers its own to a run that starts again.

    Raises:
        CheckpointError: all checkpoints of a founder are damaged.
        ValueError: the checkpoint is of another model or optimizer.
    """
    settings = trained.file.run
    store = CheckpointDirectory(Path(settings.checkpoints), settings.keep)
    try:
        content = store.newest(say)
    except CheckpointError as error:
        if is_founder:
            raise
        say(f"warning: {error}")
        content = None
    if content is None:
        return None
    try:
        trained.model.load_state_dict(content.parameters)
        load_optimizer(trained.optimizer, content.optimizer)
    except (RuntimeError, ValueError, KeyError, TypeError):
        where = store.path(content.step)
        raise ValueError(f"{where} is of another model or optimizer: expected another directory for them") from None
    if trained.evaluation is not None:
        try:
            trained.evaluation.go_on_after(read_evaluations(store.directory, settings.name).losses)
        except CheckpointError as error:
            say(f"warning: {error}; the evaluations begin anew")
    if not is_founder:
        say(f"has the checkpoint of step {content.step}, from which the run goes on if it starts again just now")
        return content.moment
    go_on_with_data(trained, content.data, say)
    say(f"goes on from the checkpoint of step {content.step}")
    return content.moment


def go_on_with_data(trained: TrainingSetup, data: Mapping[str, Any], say: Say) -> None:
    """Go on with the data where a checkpoint of this machine has been."""
    try:
        trained.batches.load_state_dict(dict(data))
    except (ValueError, KeyError):
        say("the data start over: the position in the checkpoint is of another part of the data")


def goes_on_from_own(who: Joining, run: TrainingRun) -> bool:
    """Return whether the run, as it has begun or was joined, goes on from what this peer has on its disk."""
    if who.resumed_at is None:
        return not who.initial_peers
    return run.num_steps == run.went_back_to == who.resumed_at.step


def take_part(trained: TrainingSetup, who: Joining, open_run: OpenRun, stopping: threading.Event, say: Say) -> None:
    """Join the run, or start it at its last checkpoint here. Train, and leave the run however training ends."""
    settings = trained.file.run
    if settings.checkpoints:
        CheckpointDirectory(Path(settings.checkpoints), settings.keep).require_of(settings.name)
        ledger = str(Path(settings.checkpoints) / f"{settings.name}.ledger")
        who = replace(who, config=replace(who.config, ledger=ledger))
        who = replace(who, resumed_at=resume(trained, say, is_founder=not who.initial_peers))
    parameters = [parameter for parameter in trained.model.parameters() if parameter.requires_grad]
    who = replace(who, local=trained.local, evaluation=trained.evaluation)
    run = open_run(who, parameters, trained.optimizer)
    try:
        say(f"others join by: --initial-peers {' '.join(run.initial_peers)}")
        writing = Writing(trained, say)
        is_own = goes_on_from_own(who, run)
        if settings.checkpoints and (who.initial_peers or not is_own):
            store = CheckpointDirectory(Path(settings.checkpoints), settings.keep)
            if data := store.data_at(run.num_steps):
                go_on_with_data(trained, data, say)
        writing.begin(run, is_own, is_founder=not who.initial_peers)
        train(trained, run, writing, stopping, say)
    finally:
        run.close()
        say(f"left the run after step {run.num_steps}")
