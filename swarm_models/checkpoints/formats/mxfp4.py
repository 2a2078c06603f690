"""The mxfp4 format: 4-bit floats with a power of two per 32 of them (the experts of gpt-oss).

Format: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, section 5
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from swarm_models.checkpoints.formats.packed import PackedForm, PackedTensor, Parts, require
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_protocol.errors import CheckpointError

_GROUP_BYTES = 16  # holds 32 numbers, which share an exponent
_NO_NUMBER = 255  # the exponent that means NaN


def forms(config: Mapping[str, Any]) -> tuple[PackedForm, ...]:
    return (PackedForm({"blocks": "_blocks", "scales": "_scales"}, "", _pack),)


def _pack(name: str, parts: Parts) -> StoredTensor:
    """Combine blocks: [experts, out, groups, 16] bytes, scales: [experts, out, groups] -> [experts, in, out]."""
    blocks, scales = parts["blocks"], parts["scales"]
    is_right = blocks.dtype == torch.uint8 and len(blocks.shape) == 4 and blocks.shape[3] == _GROUP_BYTES
    require(is_right, blocks, f"uint8 of shape [experts, rows, groups, {_GROUP_BYTES}]")
    is_right = scales.dtype == torch.uint8 and scales.shape == blocks.shape[:3]
    require(is_right, scales, f"uint8 of shape {list(blocks.shape[:3])}, an exponent for each group")
    experts, rows, groups, _ = blocks.shape
    # Exact in bfloat16: a number has two significant bits, and the exponents are those of bfloat16.
    shape = (experts, groups * 2 * _GROUP_BYTES, rows)
    return PackedTensor(
        name, torch.bfloat16, shape, parts, partial(_unpack, name=name), dict.fromkeys(parts, Fraction(1))
    )


def _unpack(blocks: torch.Tensor, scales: torch.Tensor, *, name: str) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if bool((scales == _NO_NUMBER).any()):
        raise CheckpointError(
            f"the scales of tensor {name} are damaged: an exponent is {_NO_NUMBER}, which is no number"
        )
    experts, rows, groups, _ = blocks.shape
    unpacked = torch.empty(experts, groups * 2 * _GROUP_BYTES, rows, dtype=torch.bfloat16)
    for expert in range(experts):  # one expert at a time, because the conversion makes several copies of its input
        one = slice(expert, expert + 1)
        unpacked[one] = convert_moe_packed_tensors(blocks[one], scales[one], dtype=torch.bfloat16)
    return unpacked
