"""Builders from a run file: a stage with its optimizer and its gradient sums, and a trainer's micro-batches."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import check_location, locate
from swarm_protocol.failures import first_line
from swarm_protocol.process.scratch import scratch_directory
from swarm_training.commands.building import (
    build_blocks,
    build_held_out,
    build_outer_optimizer,
    build_tokenizer,
    preset_config,
    scheduled,
)
from swarm_training.commands.checking import require_held_out
from swarm_training.compression.compressor import Plain
from swarm_training.compression.settings import AveragingSettings
from swarm_training.contract.backend import PeerAddress
from swarm_training.core.config import TrainingConfig
from swarm_training.data.blocks import TokenBlocks
from swarm_training.evaluation.policy import MOST_SPARED
from swarm_training.optim.by_name import decay_groups, optimizer_by_name
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.run.state import TrainedState
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.engine.accumulator import Accumulator
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.settings import BoundarySettings, LoraSettings, Scratch, StageOptions, StageSource
from swarm_training.stages.engine.skeleton import ties_embeddings
from swarm_training.stages.engine.stage import Stage
from swarm_training.stages.placement.memory import StageNeeds, room_of
from swarm_training.stages.rpc.client import WireForms
from swarm_training.stages.rpc.room import StageLimits
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.micro_batches import BlockMicroBatches, loss_scale_of

PRESUME_GONE_S = 8.0  # the silence after which a mate counts as gone: both sides of a cut network compute the same


@dataclass(frozen=True)
class BuiltStage:
    """A stage with its optimizer and gradient sums."""

    stage: Stage
    # The stage's parameters and the optimizer that steps with averages; the learning rate follows from the global step,
    # also that of local steps.
    state: TrainedState
    sums: Accumulator
    limits: StageLimits  # the limits of what trainers may send
    memory: str = ""  # a part of a sentence that says what the peer holds
    local: LocalSteps | None = None  # the peer's own steps between two averages; None: there are none


def require_stages(file: RunFile) -> int:
    """Return the number of micro-batches in a batch. Raises ValueError if the run cannot be trained in stages."""
    if not file.stages.count:
        raise ValueError("the run is not trained in stages: expected their number as `count` under [stages]")
    if file.run.hub:
        raise ValueError(
            f"hub is {file.run.hub!r}: expected none in a run in stages, since no peer has the whole model; "
            "`swarm train export` writes it"
        )
    averaging = file.averaging
    others = replace(averaging, codec="fp32", error_feedback=False, straggler_s=0.0)
    if others != AveragingSettings() or (averaging.error_feedback and not file.local.batch_size):
        raise ValueError(
            "a run in stages counts each micro-batch exactly: expected nothing under [averaging] but `codec`, "
            "`straggler_s` and, with [local], `error_feedback`"
        )
    return file.stages.num_micro_batches(file.run.target_batch_size)


def lasting_directory(file: RunFile) -> Path | None:
    """Return the directory in which this machine keeps the checkpoints of all stages; None: it has only temporary ones.
    With local steps, checkpoints are of another optimizer, and in a directory of their own."""
    run, suffix = file.run, "-with-local-steps" if file.local.batch_size else ""
    return Path(run.checkpoints) / run.name / f"{file.stages.count}-stages{suffix}" if run.checkpoints else None


def require_same_count(file: RunFile) -> None:
    """Raise ValueError if there are checkpoints of the run with another number of stages. Raise it too if they are with
    local steps and the run file is without, or the other way round."""
    directory = lasting_directory(file)
    if directory is None or directory.exists():
        return
    if others := sorted(path.name for path in directory.parent.glob("*-stages*")):
        raise ValueError(
            f"{directory.parent} has checkpoints of this run in {others[0].replace('-', ' ')}: expected as many as "
            "`count` under [stages], [local] as it was then, or another directory as `checkpoints` under [run]"
        )


def training_config(file: RunFile, address: PeerAddress | None = None) -> TrainingConfig:
    """Return a peer's settings. ``address``: how others reach it; None: as ``TrainingConfig`` has it by default.

    Raises SwarmError if temporary files have no room."""
    codec = "fp64" if file.stages.sums == "fp64" else file.averaging.codec
    config, lasting = file.peer_config, lasting_directory(file)
    return replace(
        config,
        counting="exact",
        codec=codec,
        presume_gone_s=PRESUME_GONE_S,
        checkpoints_kept=max(config.checkpoints_kept, file.run.keep) if lasting else config.checkpoints_kept,
        checkpoint_directory=None if lasting else scratch_directory(),
        lasting_directory=lasting,
        evaluation=file.evaluation.policy,
        **asdict(address or PeerAddress()),
    )


def stage_source(file: RunFile) -> StageSource:
    """Return the source of the model's weights. Raises ValueError if there is no such model."""
    from transformers import AutoConfig

    model = file.model
    if model.preset:
        config = preset_config(model.preset, len(build_tokenizer(model)), file.data.block_length)
        return Scratch(config, model.seed)
    check_location(name := locate(model.name_or_path))
    if model.init == "pretrained":
        return ModelCheckpoint.open(name)
    try:
        return Scratch(AutoConfig.from_pretrained(name), model.seed)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model.name_or_path} is no causal language model: {first_line(error)}") from None


def require_untied(file: RunFile, source: StageSource) -> None:
    """Raise ValueError if there are local steps, and the first and the last stage would train the same embeddings.
    Peers of all stages check it, since the stages between them would wait for ever."""
    is_split = file.stages.count > 1 and not file.stages.lora_rank  # adapters are in blocks alone
    if file.local.batch_size and is_split and ties_embeddings(source.config):
        raise ValueError(
            "the model's embeddings are those of its output layer, and there is [local]: expected a model whose output "
            "layer has weights of its own, or a lora_rank under [stages], since a local step at the first or the last "
            "stage knows its own part of their gradient alone"
        )


def stage_options(file: RunFile, device: str) -> StageOptions:
    settings = file.stages
    lora = LoraSettings(rank=settings.lora_rank, seed=file.model.seed) if settings.lora_rank else None
    boundaries = BoundarySettings(settings.layers, file.model.seed)
    return StageOptions(settings.precision, settings.checkpoint_activations, lora, device, boundaries=boundaries)


def build(
    file: RunFile,
    source: StageSource,
    index: int,
    config: TrainingConfig,
    device: str = "cpu",
    memory_bytes: int | None = None,
) -> BuiltStage:
    """Build a stage. ``memory_bytes``: the memory that the process may take.

    Raises ValueError if there is no such stage, or no room for it, and as ``build_stage``.
    """
    num_micro_batches = require_stages(file)
    stage = build_stage(source, index, file.stages.count, stage_options(file, device))
    settings = file.optimizer
    needs = needs_of(file, stage)
    room = room_of(needs, memory_bytes)
    stage.keep_at_most(room.kept)
    groups = decay_groups(stage.parameters, settings.weight_decay, settings.decay_vectors)
    optimizer = optimizer_by_name(settings.name, groups, lr=settings.rate(0))
    local: LocalSteps | None = None
    stepping, common = optimizer, config.common
    if file.local.batch_size:
        local = LocalSteps(optimizer, file.local.batch_size // file.stages.micro_batch_size)
        stepping, common = build_outer_optimizer(file.local, stage.parameters), common | local.common
    drifts, decay = local is not None, config.average_decay
    state = TrainedState(stage.parameters, stepping, Plain(), common, config.max_norm, drifts, decay)
    scheduled(optimizer, settings.rate, lambda: state.step)
    dtype = torch.float64 if file.stages.sums == "fp64" else torch.float32
    sums = Accumulator(stage, num_micro_batches, dtype, room.pending)
    num_checkpoints = config.checkpoints_kept + (MOST_SPARED if file.evaluation.every else 0)
    limits = StageLimits(max_bytes=room.requests)
    return BuiltStage(stage, state, sums, limits, needs.described(room, num_checkpoints), local)


def needs_of(file: RunFile, stage: Stage) -> StageNeeds:
    tensor_bytes = 8 * stage.width * file.stages.micro_batch_size * file.data.block_length  # at most: those of fp64
    most_bytes = 2 * 2 * tensor_bytes  # inputs and gradients, twice: no trainer gets more than half of the room
    num_rooms = 2 if file.stages.audit_share else 1  # auditors' requests have a room of their own
    return StageNeeds(
        stage.num_trained,
        stage.untrained_bytes,
        file.optimizer.name,
        file.stages.sums,
        most_bytes,
        num_rooms,
        is_averaged=bool(file.optimizer.average_decay),
        is_shared=bool(stage.shared),
        local=file.local,
        keeps_errors=file.averaging.error_feedback,
    )


def build_micro_batches(file: RunFile) -> BlockMicroBatches:
    """Return a run's micro-batches. Raises ValueError if there are no such data, or if they are streamed: the content
    of a micro-batch must follow from its number."""
    if file.data.streaming:
        raise ValueError("data of a run in stages cannot be streamed: expected streaming = false under [data]")
    cache = platformdirs.user_cache_path("swarm") / "tokens"
    blocks = build_blocks(file.data, file.run.name, build_tokenizer(file.model), cache)
    return BlockMicroBatches(blocks, file.run.name, require_stages(file), file.stages.micro_batch_size)


def held_out_samples(file: RunFile) -> TokenBlocks | None:
    """Return the held-out samples; None if the run is not evaluated. Raises ValueError if there are no such data."""
    if not file.evaluation.every:
        return None
    require_held_out(file)
    return build_held_out(file.evaluation, file.data.block_length, build_tokenizer(file.model))


def loss_scale(file: RunFile) -> float:
    """Return the loss scale of ``build_micro_batches`` without loading any data."""
    return loss_scale_of(file.stages.micro_batch_size, file.data.block_length)


def trainer_config(file: RunFile) -> TrainerConfig:
    forms = WireForms(file.stages.activations, file.stages.gradients)
    share, precision = file.stages.audit_share, file.stages.precision
    return TrainerConfig(forms=forms, audit_share=share, precision=precision)
