"""The settings of a stage: the source of its weights, its precision, and what is trained."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from transformers import PreTrainedConfig

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.wire.constants import MIB
from swarm_training.stages.compress.layers import NONE


@dataclass(frozen=True, eq=False)
class Scratch:
    """A model that begins with random weights.

    Every module's numbers follow from ``seed`` and the module's name alone, drawn as its family draws them. However a
    model is split, its stages have the weights of one process with the same seed.
    """

    config: PreTrainedConfig
    seed: int = 0


StageSource = ModelCheckpoint | Scratch


@dataclass(frozen=True)
class LoraSettings:
    """The settings of low-rank adapters in every stage's blocks (Hu et al., 2021); nothing else is trained then. The
    adapters are in the layers that PEFT adapts by default in the family."""

    rank: int = 8
    seed: int = 0  # the seed of the matrices that do not begin at 0


@dataclass(frozen=True)
class BoundarySettings:
    """The settings of layers between stages, which reduce the numbers that travel; they are trained with the rest."""

    layers: str = NONE  # the name of the layers, see ``BoundaryCompression``
    seed: int = 0  # the seed of the numbers that they begin with


@dataclass(frozen=True)
class StageOptions:
    """The options of a stage."""

    precision: str = "fp32"  # "fp32", or "bf16": computes with bf16 copies of fp32 weights, which the optimizer changes
    checkpoint_activations: bool = False  # ``backward`` keeps each block's input alone and computes the rest twice
    lora: LoraSettings | None = None  # the adapters that are trained instead of all weights
    device: str = "cpu"
    # The most bytes of activations that wait for their backward; without room they are computed again. None are kept
    # with ``checkpoint_activations``.
    kept_bytes: int = 512 * MIB
    # The layers between stages, by default none; not with ``lora``: its adapter is for the stock model.
    boundaries: BoundarySettings = BoundarySettings()


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a module's own stream of random numbers: 63 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
