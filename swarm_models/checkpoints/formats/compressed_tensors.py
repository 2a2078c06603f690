"""The compressed-tensors formats: fp8, int8 or packed integers; each group of tensors names its own format.

Format: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from swarm_models.checkpoints.formats.fp8 import is_block, pack_fp8
from swarm_models.checkpoints.formats.groups import WORD_BITS, Integers, IntegerTensor, pack_words, unpack_words
from swarm_models.checkpoints.formats.packed import PackedForm, Parts, require, require_groups, setting
from swarm_models.checkpoints.safetensors_file import FLOAT8, StoredTensor
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import shown

_UNUSED = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point"),
    *(".k_scale", ".v_scale", ".q_scale"),
)
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_OPTIONAL = {"zero_point": ".weight_zero_point", "g_idx": ".weight_g_idx"}


def forms(config: Mapping[str, Any]) -> tuple[PackedForm, ...]:
    """Return the two supported forms; raise CheckpointError if a group of tensors has an unknown format.

    The bits of a weight, and which inputs share a scale, follow from the shapes of its parts.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"quantization_config has config_groups={shown(groups)}: expected an object of objects")
    for key in ("transform_config", "sparsity_config"):
        extra = config.get(key)
        if extra and not (isinstance(extra, dict) and extra.get("format") == "dense"):
            raise CheckpointError(f"quantization_config has a {key}, which cannot be read: expected none")
    for group in groups.values():
        setting({"format": group.get("format") or config.get("format")}, "format", _FORMATS)
    words = {"packed": ".weight_packed", "scale": ".weight_scale", "shape": ".weight_shape"}
    plain = {"scale": ".weight_scale", "weight": ".weight"}
    return (
        PackedForm(words, ".weight", _pack_words, _OPTIONAL, _UNUSED),
        PackedForm(plain, ".weight", partial(_pack_plain, block=_block_of(groups.values())), _OPTIONAL, _UNUSED),
    )


def _block_of(groups: Iterable[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return the size of the blocks that share a scale, which is the same in all groups; None if there are none."""
    blocks: list[Any] = [
        weights.get("block_structure")
        for weights in (group.get("weights") for group in groups)
        if isinstance(weights, dict) and weights.get("strategy") == "block"
    ]
    if not blocks:
        return None
    if any(block != blocks[0] for block in blocks) or not is_block(blocks[0]):
        raise CheckpointError(
            f"quantization_config has block_structure={shown(blocks)}: expected two sizes, the same in all groups"
        )
    return blocks[0][0], blocks[0][1]


# ---------------------------------------------------------------- a byte for each weight


def _pack_plain(name: str, parts: Parts, block: tuple[int, int] | None) -> StoredTensor:
    """Combine weight: [out, in] int8 or float8, and scale: one number, [out, 1], [out, groups] or one per ``block``."""
    weight, scale = parts["weight"], parts["scale"]
    is_right = weight.dtype in {*FLOAT8, torch.int8} and len(weight.shape) == 2
    require(is_right, weight, "a matrix of int8 or float8")
    if block is not None and weight.dtype in FLOAT8 and scale.shape[:1] != weight.shape[:1]:
        return pack_fp8(name, {"weight": weight, "scale": scale}, block)
    _require_groups(parts, *weight.shape)
    if "zero_point" in parts:
        zero = parts["zero_point"]
        require(zero.dtype == torch.int8 and zero.shape == scale.shape, zero, f"int8 of shape {list(scale.shape)}")
    return IntegerTensor(name, torch.float32, weight.shape, parts, partial(_unpack_plain))


def _unpack_plain(
    weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None, g_idx: torch.Tensor | None = None
) -> Integers:
    zero = 0 if zero_point is None else _by_row(zero_point)
    return Integers(weight, _by_row(scale), zero, _order(g_idx))


# ---------------------------------------------------------------- words


def _pack_words(name: str, parts: Parts) -> StoredTensor:
    """Combine packed: [out, in / n] words of n integers; scale as in ``_pack_plain``; zero points may be words, too."""
    packed, scale, shape = parts["packed"], parts["scale"], parts["shape"]
    require(packed.dtype == torch.int32 and len(packed.shape) == 2, packed, "a matrix of int32")
    require(shape.dtype in (torch.int32, torch.int64) and shape.shape == (2,), shape, "two integers")
    rows, width = shape.read().tolist()
    fitting = [bits for bits in (4, 8) if packed.shape == (rows, -(-width * bits // WORD_BITS))]
    require(bool(fitting) and width > 0, packed, f"{rows} rows with words for {width} integers of 4 or 8 bits")
    (bits, *_) = fitting
    _require_groups(parts, rows, width)
    if "zero_point" in parts:
        zero = parts["zero_point"]
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        words = (-(-rows * bits // WORD_BITS), groups)
        is_right = zero.dtype == torch.int32 and zero.shape == words
        is_right |= zero.dtype == torch.int8 and zero.shape == scale.shape
        require(is_right, zero, f"int32 of shape {list(words)}, or int8 of shape {list(scale.shape)}")
    unpack = partial(_unpack_words, bits=bits, width=width)
    return IntegerTensor(name, torch.float32, (rows, width), parts, unpack)


def _unpack_words(
    packed: torch.Tensor,
    scale: torch.Tensor,
    shape: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    g_idx: torch.Tensor | None = None,
    *,
    bits: int,
    width: int,
) -> Integers:
    rows, middle = len(packed), 1 << (bits - 1)  # integers are stored unsigned, with the middle added
    zero: torch.Tensor | int = middle
    if zero_point is not None and zero_point.dtype == torch.int32:
        zero = unpack_words(zero_point.T, bits)[:, :rows].T
    elif zero_point is not None:
        zero = _by_row(zero_point).float() + middle
    return Integers(unpack_words(packed, bits)[:, :width], _by_row(scale), zero, _order(g_idx))


# ---------------------------------------------------------------- groups of inputs


def _require_groups(parts: Parts, rows: int, width: int) -> None:
    scale = parts["scale"]
    require(scale.dtype.is_floating_point, scale, "floats")
    is_one = scale.shape in ((), (1,), (1, 1))
    groups = 1 if len(scale.shape) < 2 else scale.shape[1]
    is_right = is_one or (scale.shape in ((rows,), (rows, groups)) and groups > 0)
    require(is_right, scale, f"one scale, or {rows} rows of one or more")
    require_groups(parts, scale, width, groups)


def _by_row(values: torch.Tensor) -> torch.Tensor:
    """Return values of shape [], [out] or [out, groups] as [1, 1] or [out, groups]."""
    return values.reshape(-1, 1) if values.ndim < 2 else values


def _order(g_idx: torch.Tensor | None) -> torch.Tensor | None:
    """Return the group of each input; None if inputs are in order, which all -1 means too."""
    return None if g_idx is None or bool((g_idx == -1).all()) else g_idx


# ---------------------------------------------------------------- writing


def four_bit_parts(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that are stored for a weight of 4 bits, by the ends of their names.

    q: [out, in] uint8 from 0 to 15; scale, zero: [out, groups] float, scales of at most 8 significant bits.
    """
    return {
        ".weight_packed": pack_words(q, 4),
        ".weight_scale": scale.bfloat16(),
        ".weight_zero_point": pack_words(zero.T.to(torch.uint8), 4).T.contiguous(),
        ".weight_shape": torch.tensor(q.shape),
    }


def int8_parts(q: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that are stored for a weight in int8. q: [out, in] int8; scale: [out] float."""
    return {".weight": q, ".weight_scale": scale[:, None].float()}


def mixed_config(four_bits: Sequence[str], eight_bits: Sequence[str], left: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint with layers in 4 bits in groups of 32, and in int8.

    The arguments are the names of the layers in 4 bits, of those in int8, and of those that are not packed.
    """
    common = {"type": "int", "dynamic": False}
    four = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32, **common}
    eight = {"num_bits": 8, "symmetric": True, "strategy": "channel", **common}
    groups = {
        "group_0": {"targets": list(eight_bits), "weights": eight, "format": "int-quantized"},
        "group_1": {"targets": list(four_bits), "weights": four, "format": "pack-quantized"},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {name: group for name, group in groups.items() if group["targets"]},
        "ignore": list(left),
    }
