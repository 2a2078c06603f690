"""The settings in a run file, as frozen values. Their comments and docstrings document the file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import cos, pi

from swarm_protocol.access.organiser import SwarmKey
from swarm_training.compression.settings import AveragingSettings
from swarm_training.core.checks import require, require_one_of
from swarm_training.core.config import (
    SLOW_ROUND_S,
    EvaluationPolicy,
    RollbackPolicy,
    TrainingConfig,
    check_average_decay,
    check_max_norm,
    checkpoints_needed,
)
from swarm_training.data.settings import DataSettings
from swarm_training.runfile.stage_settings import StageSettings

INITS = ("random", "pretrained")
OPTIMIZERS = ("adamw", "sgd", "lamb", "lamb8bit", "adamw8bit", "muon")
SCHEDULES = ("constant", "linear", "cosine")
PRESETS = {"tiny": (64, 2, 4), "small": (256, 6, 8), "medium": (768, 12, 12)}  # hidden size, layers, heads
_LARGEST = 1e30
_MAX_COUNT = 1 << 40
_LONGEST_WAIT_S = 55.0  # less than the ``join_timeout_s`` of peers that join meanwhile


def require_count(name: str, value: int) -> None:
    if not 1 <= value <= _MAX_COUNT:
        raise ValueError(f"{name} is {value}: expected {'at least 1' if value < 1 else f'at most {_MAX_COUNT}'}")


@dataclass(frozen=True)
class RunSettings:
    """The table ``[run]``."""

    name: str
    target_batch_size: int  # the samples of all peers together, after which they average and step
    # The steps between checkpoints; peers keep the last ones, to go back to when the run diverges.
    checkpoint_every: int = 100
    checkpoints: str = "checkpoints"  # the directory for checkpoints; empty: this machine writes none
    keep: int = 3  # the number of newest checkpoints that stay in the directory
    # The time, in seconds, for which the founder of a run that starts again waits for peers that have a newer
    # checkpoint than it has; 0: it begins at once.
    restart_wait_s: float = 30.0
    hub: str = ""  # a repository on the hub that gets a copy of each checkpoint; empty: none

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,64}", self.name, re.ASCII):
            raise ValueError(f"name is {self.name!r}: expected 1 to 64 letters, digits, dots, dashes and underscores")
        require_count("target_batch_size", self.target_batch_size)
        require_count("checkpoint_every", self.checkpoint_every)
        require_count("keep", self.keep)
        if not 0 <= self.restart_wait_s <= _LONGEST_WAIT_S:
            raise ValueError(f"restart_wait_s is {self.restart_wait_s}: expected seconds, 0 to {_LONGEST_WAIT_S:.0f}")
        if self.hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub, re.ASCII):
            raise ValueError(f"hub is {self.hub!r}: expected a repository as owner/name")


@dataclass(frozen=True)
class ModelSettings:
    """The table ``[model]``."""

    name_or_path: str = ""  # a causal language model on the hub, or a directory
    preset: str = ""  # the size of a new Llama, instead of ``name_or_path``
    init: str = "random"  # ``random`` weights in the model's shape, or the ``pretrained`` weights
    tokenizer: str = ""  # a tokenizer on the hub, or a directory; empty: the model's own
    seed: int = 0  # the seed of random weights: all peers that found or join a run begin with the same weights

    def __post_init__(self) -> None:
        if bool(self.name_or_path) == bool(self.preset):
            raise ValueError("name_or_path and preset: expected one of the two")
        require_one_of(self, "init", INITS)
        if self.preset:
            require_one_of(self, "preset", PRESETS)
        if self.preset and not self.tokenizer:
            raise ValueError("tokenizer is missing: expected one, since a preset has none of its own")
        require(self, "seed", -(2**63) <= self.seed < 2**64, "-2**63 to 2**64 - 1")  # the range of ``manual_seed``
        require(self, "init", not self.preset or self.init == "random", "random, since a preset has no weights")


@dataclass(frozen=True)
class OptimizerSettings:
    """The table ``[optimizer]``."""

    name: str  # the name of the optimizer; optimizers of 8 bits keep their states in CPU memory
    lr: float  # the highest learning rate, after the warm-up
    weight_decay: float = 0.0
    # Whether weight decay applies to biases and the scales of norms too, not to matrices alone.
    decay_vectors: bool = True
    schedule: str = "constant"
    warmup_steps: int = 0
    # The step at which linear and cosine schedules reach 0; 0 for constant schedules, which never do.
    total_steps: int = 0
    # The decay of the moving average of the weights at each global step; 0: there is no such average.
    average_decay: float = 0.0

    def __post_init__(self) -> None:
        check_average_decay(self.average_decay)
        require_one_of(self, "name", OPTIMIZERS)
        require_one_of(self, "schedule", SCHEDULES)
        require(self, "lr", 0 < self.lr <= _LARGEST, f"a number above 0, up to {_LARGEST:g}")
        require(self, "weight_decay", 0 <= self.weight_decay <= _LARGEST, "a number of at least 0")
        require(self, "warmup_steps", 0 <= self.warmup_steps <= _MAX_COUNT, "at least 0")
        require(self, "total_steps", 0 <= self.total_steps <= _MAX_COUNT, "at least 1, or 0 (training does not end)")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps is {self.total_steps}: expected more than the {self.warmup_steps} of warmup_steps, "
                f"since the schedule is {self.schedule}"
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of a global step. It follows from the step alone: all peers have the same."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.lr * (1 - done if self.schedule == "linear" else (1 + cos(pi * done)) / 2)


@dataclass(frozen=True)
class ClipSettings:
    """The table ``[clip]``."""

    # The norm to which the average of all peers' gradients is clipped before each step, over all parameters of the
    # model, those of all stages too; 0: gradients are not clipped.
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        check_max_norm(self.max_norm)


@dataclass(frozen=True)
class LocalSettings:
    """The table ``[local]``.

    Attributes:
        batch_size: the samples after which a peer takes a step of its own with the optimizer of ``[optimizer]``; 0:
            peers take no such steps, and average at every step. In a run in stages, a multiple of ``micro_batch_size``.
        outer_lr, outer_momentum, nesterov: settings of the SGD that steps with the average of the peers' own steps.
    """

    batch_size: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        require(self, "batch_size", 0 <= self.batch_size <= _MAX_COUNT, "at least 1, or 0 (no local steps)")
        require(self, "outer_lr", 0 < self.outer_lr <= _LARGEST, f"a number above 0, up to {_LARGEST:g}")
        require(self, "outer_momentum", 0 <= self.outer_momentum < 1, "a number from 0 to less than 1")
        if self.nesterov and not self.outer_momentum:
            raise ValueError("nesterov is true: expected an outer_momentum above 0 with it, such as 0.9")


@dataclass(frozen=True)
class EvaluationSettings:
    """The table ``[evaluation]``."""

    every: int = 0  # the steps between two evaluations, each by one peer of the run; 0: there are none
    # ``source``, ``column``, ``split``, ``config``: the held-out data, as in ``[data]``, cut into samples of the same
    # length.
    source: str = ""
    samples: int = 256  # the number of samples at the beginning of these data that are used
    column: str = "text"
    split: str = "validation"
    config: str = ""
    patience: int = 0  # the evaluations in a row without an improvement after which the run ends; 0: it goes on
    # The least by which a loss must be below the lowest one before, to be an improvement.
    least_improvement: float = 0.0

    def __post_init__(self) -> None:
        assert self.policy  # which checks the numbers
        require_count("samples", self.samples)
        if bool(self.every) != bool(self.source):
            expected = "held-out data, since every is" if self.every else "none without every, which is"
            raise ValueError(f"source is {self.source!r}: expected {expected} {self.every}")

    @property
    def policy(self) -> EvaluationPolicy:
        return EvaluationPolicy(self.every, self.patience, self.least_improvement)

    def data(self, block_length: int) -> DataSettings:
        """Return the settings of the held-out data."""
        return DataSettings(self.source, block_length, column=self.column, split=self.split, config=self.config)


@dataclass(frozen=True)
class BatchSettings:
    """The table ``[batch]``."""

    size: int = 0  # the samples that a machine computes at once; 0: the machine finds out what fits
    max_size: int = 256  # the largest size that a machine tries

    def __post_init__(self) -> None:
        require_count("max_size", self.max_size)
        require(self, "size", 0 <= self.size <= self.max_size, f"0 (find out) to max_size, which is {self.max_size}")


@dataclass(frozen=True)
class TokenSettings:
    """The table ``[tokens]``."""

    organiser: str = ""  # the swarm key that ``swarm keys create`` printed: only members take part; empty: anybody may

    def __post_init__(self) -> None:
        if self.organiser:
            object.__setattr__(self, "organiser", str(SwarmKey.parse(self.organiser)))


@dataclass(frozen=True)
class RunFile:
    """The contents of a run file; each field is a table of the file."""

    run: RunSettings
    model: ModelSettings
    data: DataSettings
    optimizer: OptimizerSettings
    averaging: AveragingSettings = field(default_factory=AveragingSettings)
    clip: ClipSettings = ClipSettings()
    rollback: RollbackPolicy = field(default_factory=RollbackPolicy)
    batch: BatchSettings = BatchSettings()
    tokens: TokenSettings = TokenSettings()
    stages: StageSettings = field(default_factory=StageSettings)
    local: LocalSettings = LocalSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    def __post_init__(self) -> None:
        if self.evaluation.every:
            self._check_evaluation()
        if not self.local.batch_size:
            if self.optimizer.name == "muon":
                raise ValueError(
                    "name of [optimizer] is 'muon': expected another without [local], since its steps differ in the "
                    "last bits from machine to machine"
                )
            return
        if self.stages.count:
            self._check_local_stages()
        if rank := self.averaging.power_sgd_rank:
            raise ValueError(
                f"power_sgd_rank of [averaging] is {rank}: expected 0, since it cannot be combined with [local]"
            )
        if self.local.batch_size > self.run.target_batch_size:
            raise ValueError(
                f"batch_size of [local] is {self.local.batch_size}: expected at most the target_batch_size of [run], "
                f"which is {self.run.target_batch_size}"
            )

    @property
    def peer_config(self) -> TrainingConfig:
        """Return the settings of a peer that has the whole model, without the policy of evaluations."""
        averaging = self.averaging
        usual_s = SLOW_ROUND_S if self.local.batch_size else TrainingConfig.straggler_s
        return TrainingConfig(
            codec=averaging.codec,
            aggregation=averaging.aggregation,
            delay=averaging.delay,
            max_samples=averaging.max_samples,
            straggler_s=averaging.straggler_s or usual_s,
            max_norm=self.clip.max_norm,
            average_decay=self.optimizer.average_decay,
            restart_wait_s=self.run.restart_wait_s,
            checkpoint_every=self.run.checkpoint_every,
            checkpoints_kept=checkpoints_needed(self.run.checkpoint_every, self.rollback),
            rollback=self.rollback,
        )

    def _check_local_stages(self) -> None:
        """Raise ValueError for what needs equal weights at the peers of a stage, or knowledge of all stages."""
        stages = self.stages
        for name, value, reason in (
            ("audit_share of [stages]", stages.audit_share, "peers of a stage give different answers between averages"),
            ("max_norm of [clip]", self.clip.max_norm, "a local step knows the gradient of its own stage alone"),
            ("every of [evaluation]", self.evaluation.every, "no stage keeps the weights that an evaluation needs"),
        ):
            if value:
                raise ValueError(f"{name} is {value}: expected 0 with [local] in a run in stages, since {reason}")
        if self.optimizer.name == "muon":
            raise ValueError(
                "name of [optimizer] is 'muon': expected another in a run in stages, since its steps differ in the "
                "last bits from machine to machine"
            )
        if self.model.preset and stages.count > 1 and not stages.lora_rank:
            raise ValueError(
                f"preset of [model] is {self.model.preset!r}: expected a name_or_path with [local] in a run in stages, "
                "of a model whose output layer has weights of its own, since a preset's are its embeddings"
            )
        if self.local.batch_size % stages.micro_batch_size:
            raise ValueError(
                f"batch_size of [local] is {self.local.batch_size}: expected a multiple of the micro_batch_size of "
                f"[stages], which is {stages.micro_batch_size}"
            )
        if self.averaging.error_feedback and stages.sums == "fp64":
            raise ValueError("sums of [stages] is 'fp64': expected fp32 with error_feedback, since fp64 loses nothing")

    def _check_evaluation(self) -> None:
        own, data = self.evaluation, self.data
        if (own.source, own.split, own.config) == (data.source, data.split, data.config):
            raise ValueError(
                f"source of [evaluation] is {own.source!r} with split {own.split!r}, as in [data]: expected other "
                "data, on which nobody trains"
            )
