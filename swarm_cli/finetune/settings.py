"""The frozen configuration of a fine-tuning run. The flags of ``finetune`` take their defaults from this class."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from swarm_client.core.config import ClientConfig
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.config_flags import ConfigFlags, Flag
from swarm_protocol.process.local_registry import checked_name

METHODS = ("lora", "prompt", "deep-prompt")
SCHEDULES = ("linear", "cosine", "constant")
SUFFIXES = (".txt", ".jsonl")  # of data files
OPTIMIZERS = ("adamw", "adamw-8bit")
_LARGEST = 1e30  # because optimizers compute in float32
_COUNTS = ("rank", "num_prompt_tokens", "max_steps", "batch_size", "gradient_accumulation", "eval_every")
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    ((*_COUNTS, "early_stopping", "save_every"), lambda value: value >= 1, "at least 1"),
    (
        ("alpha", "epochs", "learning_rate", "max_grad_norm"),
        lambda value: 0 < value <= _LARGEST,
        f"a number above 0, up to {_LARGEST:g}",
    ),
    (("lora_dropout", "validation_share"), lambda value: 0 <= value < 1, "0 or more, and less than 1"),
    (("sequence_length",), lambda value: value >= 2, "at least 2 tokens"),
)
_MAY_CHANGE = {  # settings that may change when a run is resumed
    *("data", "output", "validation", "resume", "initial_peers", "discover", "swarm", "wait", "epochs"),
    *("max_steps", "recovery_timeout", "save_every", "eval_every", "swarm_key", "membership", "identity"),
}


@dataclass(frozen=True)
class FinetuneSettings:
    """The settings of a fine-tuning run. Construction raises ValueError if a field is out of its range.

    Attributes:
        target_modules: the linear layers of the blocks; if empty, PEFT chooses them for the model's family.
        epochs: the passes over the data, unless ``max_steps`` is set.
        sequence_length: the most tokens of an example; None means 512, or fewer if the model takes fewer.
        validation_share: the share of the data for validation, if there is no ``validation`` file.
        eval_every, save_every: the steps between validations, and between checkpoints; None: a tenth of the run.
        early_stopping: the number of validations in a row without a better one that end the run; None: never.
    """

    data: Path
    output: Path
    method: str = "lora"
    model: str = DEFAULT_MODEL
    revision: str | None = None
    initial_peers: tuple[str, ...] = ()
    discover: bool = False
    swarm: str = ClientConfig.swarm
    wait: float = ClientConfig.wait_timeout_s
    recovery_timeout: float = ClientConfig.recovery_timeout_s
    swarm_key: str = ClientConfig.swarm_key
    membership: Path | None = None
    identity: Path | None = None
    rank: int = 8
    alpha: float = 16
    target_modules: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    num_prompt_tokens: int = 16
    epochs: float = 3.0
    max_steps: int | None = None
    batch_size: int = 8
    gradient_accumulation: int = 1
    sequence_length: int | None = None
    learning_rate: float | None = None
    schedule: str = "linear"
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    seed: int = 0
    validation: Path | None = None
    validation_share: float = 0.05
    eval_every: int | None = None
    early_stopping: int | None = None
    save_every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        for name, known in (("method", METHODS), ("schedule", SCHEDULES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown: expected one of {', '.join(known)}")
        for names, is_in_range, expected in _RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_in_range(value):
                    raise ValueError(f"{name} is {value}: expected {expected}")
        if self.warmup_steps < 0 or self.seed < 0:
            raise ValueError("warmup_steps and seed must not be below 0")
        self._check_intervals()

    def _check_intervals(self) -> None:
        """Raise ValueError if the settings for validation and checkpoints do not fit together."""
        if not self.validates and (self.early_stopping or self.eval_every):
            raise ValueError("early_stopping and eval_every need a validation file, or a validation_share above 0")
        if self.early_stopping and self.save_interval != self.eval_interval:
            raise ValueError("early_stopping keeps the best checkpoint: save_every and eval_every must be equal")

    def client_config(self) -> ClientConfig:
        """Return the client's config. Raise ValueError if one of its fields is out of its range."""
        return ClientConfig(
            initial_peers=self.initial_peers,
            discover=self.discover,
            swarm=checked_name(self.swarm),
            wait_timeout_s=self.wait,
            recovery_timeout_s=self.recovery_timeout,
            swarm_key=self.swarm_key,
            membership=self.membership,
            identity=self.identity,
        )

    @property
    def validates(self) -> bool:
        return self.validation is not None or self.validation_share > 0

    @property
    def eval_interval(self) -> float:
        """Return steps, or a share of the run if below 1, like ``save_interval``. Early stopping makes both equal."""
        return self.eval_every or (self.early_stopping and self.save_every) or 0.1

    @property
    def save_interval(self) -> float:
        return self.save_every or (self.early_stopping and self.eval_every) or 0.1

    @property
    def chosen_learning_rate(self) -> float:
        """Return the learning rate. Prompts need a larger one: they are few numbers, and far from good values."""
        return self.learning_rate or (2e-4 if self.method == "lora" else 1e-2)

    def as_json(self, digests: Mapping[str, str] | None = None) -> str:
        """Return the settings as JSON; ``digests`` are those of the files, by the names of their settings."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return json.dumps({**values, "digests": dict(digests or {})}, indent=2)

    def require_same(self, earlier: str) -> None:
        """Raise ValueError if a run with the ``earlier`` settings, as JSON, cannot be resumed with these settings."""
        theirs, ours = json.loads(earlier), json.loads(self.as_json())
        for name in (field.name for field in fields(self)):
            if name not in _MAY_CHANGE and theirs.get(name) != ours[name]:
                flag = name.replace("_", "-")
                raise ValueError(
                    f"the run in {self.output} has --{flag} {theirs.get(name)}, not {ours[name]}: give the same value"
                )

    def require_same_data(self, earlier: str, digests: Mapping[str, str]) -> None:
        """Raise ValueError if the files' contents differ from those in the ``earlier`` settings, as JSON."""
        theirs = json.loads(earlier).get("digests", digests)
        for name in ("data", "validation"):
            if theirs.get(name) != digests.get(name):
                raise ValueError(
                    f"--{name} is not what the run in {self.output} has begun with: "
                    "resume it with the same content, or begin another in another --output"
                )


def check_file(path: Path) -> None:
    """Raise ValueError if ``path`` cannot be a file of training data."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is neither .txt nor .jsonl: expected lines of text, or of JSON")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: expected lines of text, or of JSON")


FLAGS = ConfigFlags(  # without those of every command
    FinetuneSettings,
    Flag("data", ".txt: lines of text; .jsonl: see below", metavar="FILE"),
    Flag("output", "directory for the adapter, checkpoints and the loss curve", metavar="DIR"),
    Flag("method", metavar="|".join(METHODS)),
    Flag("model", "hub name, directory, GGUF file, or smollm2", metavar="NAME_OR_PATH"),
    Flag("revision", "branch, tag or commit of a hub model"),
    Flag("wait", "time to wait for blocks that no server holds", metavar="SECONDS"),
    Flag("recovery_timeout", "time for other servers to replace failed ones", metavar="SECONDS"),
    Flag("rank", "rank of LoRA's matrices", metavar="R"),
    Flag("alpha", "LoRA adds its product times A / R", metavar="A"),
    Flag("target_modules", "q_proj v_proj …, all-linear; by default PEFT's choice for the model", metavar="NAME"),
    Flag("lora_dropout", metavar="P"),
    Flag("num_prompt_tokens", "virtual tokens, for the other methods", metavar="N"),
    Flag("epochs", "passes over the data", metavar="N"),
    Flag("max_steps", "steps to train, instead of epochs", metavar="N"),
    Flag("batch_size", "examples computed at once", metavar="N"),
    Flag("gradient_accumulation", "batches added up for one step", metavar="N"),
    Flag("sequence_length", "most tokens of an example; by default 512, or the model's positions", metavar="TOKENS"),
    Flag("learning_rate", "by default 2e-4 for lora, 1e-2 for prompts", metavar="LR"),
    Flag("schedule", "schedule of the learning rate", metavar="|".join(SCHEDULES)),
    Flag("warmup_steps", metavar="N"),
    Flag("max_grad_norm", "norm to which longer gradients are clipped", metavar="NORM"),
    Flag("optimizer", metavar="|".join(OPTIMIZERS)),
    Flag("seed"),
    Flag("validation", "file to validate on, instead of a share of the data", metavar="FILE"),
    Flag("validation_share", "share of the data to validate on; 0: no validation", metavar="SHARE"),
    Flag("eval_every", "steps between validations; by default a tenth of the run", metavar="STEPS"),
    Flag("early_stopping", "end after so many validations without a better one", metavar="PATIENCE"),
    Flag("save_every", "steps between checkpoints; by default a tenth of the run", metavar="STEPS"),
    Flag("resume", "go on with the run in DIR"),
)
