"""The settings of a run in stages: a table of its run file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarm_training.core.checks import require, require_one_of
from swarm_training.core.config import MAX_MICRO_BATCHES

SUMS = ("fp32", "fp64")
WIRE_FORMS = ("fp32", "fp64", "bf16", "int8")
PRECISIONS = ("fp32", "bf16")
LAYERS = re.compile(r"none|(bottleneck|maxout):([2-9]|[1-9][0-9]{1,4})")
_MAX_STAGES = 1 << 12
_MAX_RANK = 1 << 16


@dataclass(frozen=True)
class StageSettings:
    """The table ``[stages]``."""

    # The stages that the model is cut into, each held by several peers; 0: every peer holds all of the model.
    count: int = 0
    micro_batch_size: int = 1  # the samples that go through the stages together; a divisor of ``target_batch_size``
    # The number format of gradient sums; in fp64 they do not depend on the order in which they are added up.
    sums: str = "fp32"
    # ``activations``, ``gradients``: the number formats in which they travel between stages.
    activations: str = "fp32"
    gradients: str = "fp32"
    precision: str = "fp32"  # the number format of computing; weights are kept in fp32
    checkpoint_activations: bool = False  # True to compute blocks twice, in less memory
    lora_rank: int = 0  # the rank of adapters that are trained instead of the weights; 0: none
    # Layers that are trained with the model, so that fewer numbers travel between stages: ``bottleneck:4`` or
    # ``maxout:2``, with the factor. The model is then another one, which only software that knows them computes.
    layers: str = "none"
    # The share of a peer's work that other peers of its stage compute too, from 0 (nothing) to 1.
    audit_share: float = 0.0

    def __post_init__(self) -> None:
        choices = {"sums": SUMS, "activations": WIRE_FORMS, "gradients": WIRE_FORMS, "precision": PRECISIONS}
        for name, known in choices.items():
            require_one_of(self, name, known)
        require(self, "count", 0 <= self.count <= _MAX_STAGES, f"0 (no stages) to {_MAX_STAGES}")
        require(self, "micro_batch_size", self.micro_batch_size >= 1, "at least 1")
        require(self, "lora_rank", 0 <= self.lora_rank <= _MAX_RANK, f"0 (off) to {_MAX_RANK}")
        require(self, "audit_share", 0 <= self.audit_share <= 1, "0 (nothing is audited) to 1")
        if not LAYERS.fullmatch(self.layers):
            raise ValueError(
                f"layers is {self.layers!r}: expected none, or bottleneck or maxout with the factor by which fewer "
                "numbers travel, at least 2, such as bottleneck:4"
            )
        if self.lora_rank and self.layers != "none":
            raise ValueError(
                f"layers is {self.layers} and lora_rank {self.lora_rank}: expected none of the two, or one, since an "
                "adapter is for the stock model"
            )

    def num_micro_batches(self, target_batch_size: int) -> int:
        """Return the number of micro-batches in a batch. Raises ValueError if the batch cannot be divided so."""
        number, rest = divmod(target_batch_size, self.micro_batch_size)
        if rest or not 1 <= number <= MAX_MICRO_BATCHES:
            raise ValueError(
                f"target_batch_size is {target_batch_size}: expected 1 to {MAX_MICRO_BATCHES} times the "
                f"micro_batch_size of [stages], which is {self.micro_batch_size}"
            )
        return number
