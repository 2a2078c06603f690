"""The training of LoRA adapters or prompts on a file of text, with the frozen blocks of a swarm."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from swarm_cli.finetune.settings import FinetuneSettings, check_file
from swarm_models.checkpoints.default_model import FROM_SWARM
from swarm_protocol.atomic_file import written_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

    from swarm_client.model.hf_model import RemoteModelMixin

EXTRAS = ("accelerate", "datasets", "matplotlib")
RUN, TOKENS, CURVE = "run.json", "tokens", "loss.png"
DEFAULT_LENGTH = 512


def run_finetune(settings: FinetuneSettings, command: str) -> bool:
    """Train, print the progress, and write the adapter, checkpoints and the loss curve.

    Args:
        command: the command that started this run; with ``--resume`` it continues the run.

    Returns:
        True if the run was completed; False after Ctrl-C.

    Raises:
        ValueError: an error of the user, in one sentence; SwarmError: see ``swarm_protocol.errors``.
    """
    require_extras()
    check_output(settings)
    from transformers import set_seed

    from swarm_cli.finetune.trainer import last_checkpoint
    from swarm_cli.finetune.training_data import file_digest
    from swarm_client.model.left_out import notes_on_training
    from swarm_client.model.model import DistributedModel

    digests = {}
    for name, path in (("data", settings.data), ("validation", settings.validation)):
        if path is not None:
            check_file(path)
            digests[name] = file_digest(path)
    if settings.resume:
        settings.require_same_data((settings.output / RUN).read_text(), digests)
    tokenizer, model_config = open_model(settings)
    training, validation = load_data(settings, tokenizer, model_config)
    with DistributedModel.from_pretrained(
        settings.model, config=settings.client_config(), revision=settings.revision
    ) as model:
        set_seed(settings.seed)
        add_parameters(model, settings)
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        print(
            f"{len(training)} examples to train on, {len(validation) if validation else 0} to validate; "
            f"{num_trained:,} parameters",
            flush=True,
        )
        for note in notes_on_training(model):
            print(f"note: {note}", flush=True)
        write_run(settings, digests)
        checkpoint, _ = last_checkpoint(settings.output) if settings.resume else (None, 0)
        if settings.resume:
            print(f"going on from {checkpoint or 'the beginning: there is no checkpoint yet'}", flush=True)
        return _train(settings, command, model, tokenizer, training, validation, checkpoint)


def write_run(settings: FinetuneSettings, digests: Mapping[str, str]) -> None:
    """Write the file by which ``--resume`` knows the run, completely or not at all, because the disk may be full."""
    with written_atomically(settings.output / RUN) as partial:
        partial.write_text(settings.as_json(digests))


def require_extras(names: tuple[str, ...] = EXTRAS) -> None:
    """Raise ValueError if a package that only fine-tuning needs is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"finetune needs {', '.join(missing)}: pip install {' '.join(missing)}")


def check_output(settings: FinetuneSettings) -> None:
    """Make the output directory. Raise ValueError if it belongs to another run."""
    output, run = settings.output, settings.output / RUN
    if settings.resume:
        if not run.exists():
            raise ValueError(f"{output} has no run to resume: leave --resume out to begin one")
        settings.require_same(run.read_text())
    elif run.exists():
        raise ValueError(f"{output} has a run already: go on with it by --resume, or choose another --output")
    elif output.is_dir() and any(path.name != TOKENS for path in output.iterdir()):
        raise ValueError(f"{output} is not empty: choose another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{output} cannot be made: {error.strerror}") from None


def open_model(settings: FinetuneSettings) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """Return the tokenizer and the config of the model, which members of the swarm may have to send.

    Raises:
        CheckpointError: they cannot be read. NoSwarm: no member of the swarm answers.
    """
    from swarm_client.generation.opening import tokenizer_at
    from swarm_client.weights.opening import ModelOpening

    with closing(ModelOpening(settings.client_config())) as opening:
        checkpoint = opening.open(settings.model, settings.revision)
        return tokenizer_at(checkpoint.location, checkpoint.revision), checkpoint.config


def load_data(
    settings: FinetuneSettings, tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> tuple[Dataset, Dataset | None]:
    """Return the examples to train on, and those to validate; the latter may be None."""
    from swarm_cli.finetune.training_data import Tokenizing, load_examples

    tokenizing = Tokenizing(tokenizer, sequence_length(settings, model_config))
    data = load_examples(settings.data, tokenizing, settings.output / TOKENS)
    if settings.validation is not None:
        return data, load_examples(settings.validation, tokenizing, settings.output / TOKENS)
    if not settings.validates:
        return data, None
    if len(data) < 2:
        raise ValueError(f"{settings.data} has one example, none to validate: give more, or --validation-share 0")
    held_out = min(len(data) - 1, math.ceil(len(data) * settings.validation_share))
    parts = data.train_test_split(test_size=held_out, seed=settings.seed)
    return parts["train"], parts["test"]


def sequence_length(settings: FinetuneSettings, model_config: PretrainedConfig) -> int:
    """Return the tokens per example. Raise ValueError if the model cannot take as many tokens as were asked for."""
    from swarm_models.checkpoints.family import max_positions

    limit = max_positions(model_config)
    num_virtual = 0 if settings.method == "lora" else settings.num_prompt_tokens
    room = math.inf if limit is None else limit - num_virtual
    if room < 2 or (settings.sequence_length or 0) > room:
        virtual = f", {num_virtual} of them for the prompt" if num_virtual else ""
        raise ValueError(f"the model has {limit} positions{virtual}: choose a shorter --sequence-length")
    return settings.sequence_length or int(min(DEFAULT_LENGTH, room))


def add_parameters(model: RemoteModelMixin, settings: FinetuneSettings) -> None:
    """Add the parameters to train. Afterwards no other parameters of the model have gradients."""
    if settings.method != "lora":
        model.add_prompts(settings.method.replace("-", "_"), settings.num_prompt_tokens)
        return
    from peft import LoraConfig

    targets = list(settings.target_modules) or None
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules=model.outside_blocks(),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.blocks.swarm.model if settings.model.startswith(FROM_SWARM) else settings.model,
    )
    model.add_adapter(config)


def training_arguments(settings: FinetuneSettings, validates: bool, validates_first: bool) -> TrainingArguments:
    from transformers import TrainingArguments

    scheduler = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    return TrainingArguments(
        output_dir=str(settings.output),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.chosen_learning_rate,
        lr_scheduler_type=scheduler,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
        optim={"adamw": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit"}[settings.optimizer],
        seed=settings.seed,
        data_seed=settings.seed,
        eval_strategy="steps" if validates else "no",
        eval_steps=settings.eval_interval,
        eval_on_start=validates and validates_first,
        save_steps=settings.save_interval,
        save_total_limit=2,
        load_best_model_at_end=settings.early_stopping is not None,
        metric_for_best_model="eval_loss" if settings.early_stopping else None,
        logging_steps=0.02,  # as a share of the run
        logging_nan_inf_filter=False,  # a loss that is not finite is shown
        disable_tqdm=True,  # our own callbacks show progress
        dataloader_pin_memory=False,
        report_to="none",
        use_cpu=True,
    )


def _train(
    settings: FinetuneSettings,
    command: str,
    model: RemoteModelMixin,
    tokenizer: PreTrainedTokenizerBase,
    training: Dataset,
    validation: Dataset | None,
    checkpoint: Path | None,
) -> bool:
    from transformers import PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    from swarm_cli.finetune.loss_curve import draw_loss_curve
    from swarm_cli.finetune.trainer import AdapterTrainer, Interrupt, RandomState, misses_evaluation
    from swarm_cli.finetune.training_data import Padding
    from swarm_protocol.errors import SwarmError, TrainingDiverged

    disable_progress_bar()  # for writing checkpoints
    interrupt, after_step = Interrupt(), RandomState()
    # A run that is resumed has validated before, unless it failed when it should have.
    validates_first = checkpoint is None or (validation is not None and misses_evaluation(checkpoint))
    trainer = AdapterTrainer(
        model,
        training_arguments(settings, validation is not None, validates_first),
        data_collator=Padding(tokenizer),
        train_dataset=training,
        eval_dataset=validation,
        callbacks=[interrupt, after_step, *_own_callbacks(settings)],
    )
    trainer.remove_callback(PrinterCallback)
    go_on = command if settings.resume else f"{command} --resume"
    try:
        with interrupt:
            try:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            except TrainingDiverged as error:
                step, saved = trainer.state.global_step, trainer.save_last_step(after_step)
                kept = f"; step {saved} is saved in {settings.output}" if saved else ""
                rate = f"--learning-rate is {settings.chosen_learning_rate:g}"
                raise TrainingDiverged(f"after {step} steps, {error} ({rate}){kept}") from None
            except SwarmError:
                saved = trainer.save_last_step(after_step)
                where = f"step {saved} was the last, and is saved" if saved else "no step was made"
                print(f"{where}; go on with\n  {go_on}", file=sys.stderr)
                raise
    except KeyboardInterrupt:
        print(f"ended in mid-step; go on from the last checkpoint, if there is one, with\n  {go_on}", file=sys.stderr)
        raise
    draw_loss_curve(trainer.state.log_history, settings.output / CURVE)
    if interrupt.asked:
        step = trainer.state.global_step
        where = f"after step {step}, which is saved" if step else "before the first step"
        print(f"stopped {where}; go on with\n  {go_on}")
        return False
    trainer.save_model()
    trainer.save_state()
    shutil.rmtree(settings.output / TOKENS, ignore_errors=True)
    _tell_results(settings, trainer.state.log_history)
    return True


def _own_callbacks(settings: FinetuneSettings) -> list[TrainerCallback]:
    """Return the callbacks that show the progress, and those that end a run which has diverged or is good enough."""
    from transformers import EarlyStoppingCallback

    from swarm_cli.finetune.trainer import Bar, LastStep, Lines, StaysFinite

    callbacks: list[TrainerCallback] = [StaysFinite(), Lines(), LastStep()]
    if sys.stderr.isatty():
        callbacks.append(Bar())
    if settings.early_stopping:
        callbacks.append(EarlyStoppingCallback(settings.early_stopping))
    return callbacks


def _tell_results(settings: FinetuneSettings, history: list[dict[str, float]]) -> None:
    from swarm_client.adapters.trained import how_to_use

    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    if losses:
        print(f"validation loss {losses[0]:.3f} → {min(losses) if settings.early_stopping else losses[-1]:.3f}")
    print(f"loss curve: {settings.output / CURVE}\nadapter: {settings.output}; use it with")
    print(how_to_use(settings.model, settings.output, settings.swarm))
