"""Reads LoRA adapters in PEFT's format: a directory with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from swarm_protocol.checkpoints.family import Family
from swarm_protocol.checkpoints.safetensors_file import read_header
from swarm_protocol.errors import CheckpointError
from swarm_protocol.wire.adapters import Adapter, LowRank

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"\.lora_([AB])\.weight$")

_SCALED = "which scales weights by their magnitude: expected plain LoRA"
_BASE = "which changes the model's own weights: expected true, false, gaussian, eva or orthogonal"
# What of a config makes an adapter something else than low-rank matrices beside linear layers, and why it is refused.
_REFUSED: dict[str, str] = {
    "use_dora": _SCALED,
    "use_qalora": "which pools the inputs: expected plain LoRA",
    "use_bdlora": "whose matrices are block-diagonal: expected plain LoRA",
    "lora_bias": "which trains biases: expected plain LoRA",
    "modules_to_save": "which trains whole modules: expected plain LoRA",
    "trainable_token_indices": "which trains embeddings: expected plain LoRA",
    "target_parameters": "which adapts parameters that are no linear layers, such as fused experts",
    "layer_replication": "which repeats blocks: expected the model as it is",
    "alora_invocation_tokens": "which acts after certain tokens only: expected plain LoRA",
    "arrow_config": "which combines several adapters: expected plain LoRA",
    "kasa_config": "which changes the model's own weights: expected plain LoRA",
    "monteclora_config": "which samples its matrices: expected plain LoRA",
}
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")  # of init_lora_weights; others change the base


def read_adapter(directory: Path, family: Family) -> Adapter:
    """The adapter in ``directory`` for a model of this family, in fp32, without salt.

    Raises:
        CheckpointError: it cannot be read, or is more than low-rank matrices inside blocks; one sentence says why.
    """
    config = _read_config(directory)
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    for key, stored in read_header(directory / WEIGHTS_NAME).items():
        match = _MATRIX.search(key)
        if match is None:
            raise CheckpointError(f"adapter {directory} has a tensor {key!r}: expected lora_A and lora_B of modules")
        if family.block_index(key) is None:
            raise CheckpointError(
                f"adapter {directory} changes {_module(key)!r}, which is not inside the model's blocks: "
                "servers hold nothing else"
            )
        if len(stored.shape) != 2:
            raise CheckpointError(f"adapter {directory} has a tensor {key!r} of shape {list(stored.shape)}: no matrix")
        matrices.setdefault(_module(key), {})[match[1]] = stored.read().float()
    parts = []
    for module, pair in matrices.items():
        block = family.block_index(module + ".")
        assert block is not None  # as found above
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise CheckpointError(f"adapter {directory} has no lora_A and lora_B of one rank for {module!r}")
        if not all(bool(torch.isfinite(matrix).all()) for matrix in pair.values()):
            raise CheckpointError(f"adapter {directory} is not finite (it contains NaN or infinity) in {module!r}")
        parts.append(
            LowRank(
                block,
                family.name_in_block(module + ".").removesuffix("."),
                _scaling(config, module, pair["A"].shape[0]),
                pair["A"],
                pair["B"],
                float(config.get("lora_dropout") or 0.0),
            )
        )
    if not parts:
        raise CheckpointError(f"adapter {directory} has no tensors")
    return Adapter(b"", tuple(sorted(parts, key=lambda part: (part.block, part.module))))


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / CONFIG_NAME
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"adapter {directory} has no readable {CONFIG_NAME} ({type(error).__name__})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"adapter {directory} is of PEFT's type {kind!r}: expected LORA")
    for name, why in _REFUSED.items():
        if config.get(name):
            raise CheckpointError(f"adapter {directory} uses {name}, {why}")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"adapter {directory} trains biases (bias={config['bias']!r}): expected 'none'")
    if config.get("init_lora_weights") not in _BEGINNINGS:
        raise CheckpointError(f"adapter {directory} has init_lora_weights={config['init_lora_weights']!r}, {_BASE}")
    numbers = [config.get("lora_alpha", 8), config.get("lora_dropout") or 0.0]
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(
        isinstance(number, int | float) for number in [*numbers, *patterns.values()]
    ):
        raise CheckpointError(f"adapter {directory} has a {CONFIG_NAME} whose lora_alpha or lora_dropout is no number")
    if not 0 <= numbers[1] < 1:
        raise CheckpointError(f"adapter {directory} has lora_dropout={numbers[1]}: expected at least 0, less than 1")
    return config


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """As PEFT's ``LoraLayer.update_layer``; the rank, which ``rank_pattern`` may have set, is that of the matrices."""
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    scaling: float = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    return scaling


def _module(key: str) -> str:
    """Its name in the model to which the adapter was added."""
    return _MATRIX.sub("", key).removeprefix(_PREFIX)
