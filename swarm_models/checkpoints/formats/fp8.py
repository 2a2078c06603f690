"""The fp8 format: 8-bit floats with a scale per block, per row or per weight (DeepSeek-V3, Qwen3-FP8)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from swarm_models.checkpoints.formats.packed import PackedForm, PackedTensor, Parts, require, require_finite
from swarm_models.checkpoints.safetensors_file import FLOAT8, StoredTensor
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import shown

_UNUSED = (".input_scale", ".activation_scale", ".qscale_act", ".k_scale", ".v_scale")
_MAX_BLOCK = 1 << 20


def forms(config: Mapping[str, Any]) -> tuple[PackedForm, ...]:
    """Return the forms for a ``quantization_config``; raise CheckpointError if the config makes no sense."""
    block = config.get("weight_block_size")
    if block is not None and not is_block(block):
        raise CheckpointError(f"quantization_config has weight_block_size={shown(block)}: expected two sizes")
    pack = partial(pack_fp8, block=None if block is None else tuple(block))
    scales = (".weight_scale_inv", ".weight_scale", ".qscale_weight")
    linears = [PackedForm({"scale": end, "weight": ".weight"}, ".weight", pack, unused=_UNUSED) for end in scales]
    return (*linears, PackedForm({"scale": "_scale_inv", "weight": ""}, "", pack))  # the last form is for fused experts


def is_block(block: object) -> bool:
    """Return whether the value is a list of two sizes."""
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size <= _MAX_BLOCK for size in block)
    )


def pack_fp8(name: str, parts: Parts, block: tuple[int, int] | None = None) -> StoredTensor:
    """Combine weight: [..., out, in] float8 with its scale.

    The scale is [..., out blocks, in blocks] if ``block`` is their size, else [..., out, 1], [out] or one number.
    """
    weight, scale = parts["weight"], parts["scale"]
    require(weight.dtype in FLOAT8 and len(weight.shape) >= 2, weight, "a matrix of float8")
    require(scale.dtype.is_floating_point, scale, "floats")
    *experts, rows, width = weight.shape
    part_rows = {"weight": Fraction(1)}
    if block is not None:
        blocks = (*experts, -(-rows // block[0]), -(-width // block[1]))
        require(scale.shape == blocks, scale, f"{list(blocks)}, a scale for each block of {block[0]}x{block[1]}")
        unpack = partial(_unpack_blocks, name=name, block=block)
        part_rows["scale"] = Fraction(1) if experts else Fraction(1, block[0])  # a row is an expert, or an output
    else:
        per_row = scale.shape in ((rows,), (*experts, rows, 1), (*experts, 1, 1))
        require(per_row or scale.shape in ((), (1,)), scale, f"one scale, or {rows}, one for each row")
        unpack = partial(_unpack_rows, name=name)
        if scale.shape[:1] == weight.shape[:1] and (not experts or len(scale.shape) > 1):
            part_rows["scale"] = Fraction(1)
    return PackedTensor(name, torch.float32, weight.shape, parts, unpack, part_rows)


def _unpack_rows(weight: torch.Tensor, scale: torch.Tensor, *, name: str) -> torch.Tensor:
    scale = require_finite(scale, name)
    return weight.float().mul_(scale if scale.ndim == weight.ndim else scale.reshape(-1, 1))


def _unpack_blocks(weight: torch.Tensor, scale: torch.Tensor, *, name: str, block: tuple[int, int]) -> torch.Tensor:
    unpacked = weight.float()
    rows, width = weight.shape[-2:]
    scale = require_finite(scale, name).repeat_interleave(block[0], dim=-2)[..., :rows, :]  # [..., out, blocks of in]
    for index, start in enumerate(range(0, width, block[1])):  # the last block may be cut short
        unpacked[..., start : start + block[1]].mul_(scale[..., index, None])
    return unpacked
