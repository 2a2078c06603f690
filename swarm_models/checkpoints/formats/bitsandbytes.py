"""The bitsandbytes formats: nf4 and fp4 with a largest value per block, and int8 with a largest value per row.

Format: ``QuantState.as_dict`` and ``Linear8bitLt`` of https://github.com/bitsandbytes-foundation/bitsandbytes. The
package is not used: it takes seconds to import. On a CPU, its version 0.50 misreads widths that are not multiples of
its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from swarm_models.checkpoints.formats.groups import Integers, IntegerTensor
from swarm_models.checkpoints.formats.packed import PackedForm, PackedTensor, Parts, require, require_finite
from swarm_models.checkpoints.safetensors_file import FileTensor, StoredTensor
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import parse_object, shown

_MAX_STATE_BYTES = 4096
_MOST_OFFSET = 1e30
_BLOCK_SIZES = {32, 64, 128, 256, 512, 1024, 2048, 4096}
_TILE = 1 << 20  # how many numbers are unpacked at a time
_TOP = 127  # the largest int8


def forms(config: Mapping[str, Any]) -> tuple[PackedForm, ...]:
    nested = {"nested_absmax": ".nested_absmax", "nested_quant_map": ".nested_quant_map"}
    blocks = {"weight": "", "absmax": ".absmax", "quant_map": ".quant_map"}
    return (
        *(
            PackedForm({"state": f".quant_state.bitsandbytes__{kind}", **blocks}, "", _pack_blocks, nested)
            for kind in ("nf4", "fp4")
        ),
        PackedForm({"scale": ".SCB", "weight": ".weight"}, ".weight", _pack_rows, unused=(".weight_format",)),
    )


# ---------------------------------------------------------------- int8


def _pack_rows(name: str, parts: Parts) -> StoredTensor:
    """Combine weight: [out, in] int8, and scale: [out], the value that 127 stands for in each row."""
    weight, scale = parts["weight"], parts["scale"]
    require(weight.dtype == torch.int8 and len(weight.shape) == 2, weight, "a matrix of int8")
    is_right = scale.dtype.is_floating_point and scale.shape == weight.shape[:1]
    require(is_right, scale, f"{weight.shape[0]} floats, one for each row")
    return IntegerTensor(name, torch.float32, weight.shape, parts, partial(_unpack_rows))


def _unpack_rows(weight: torch.Tensor, scale: torch.Tensor) -> Integers:
    return Integers(weight, scale.float()[:, None] / _TOP, 0)


# ---------------------------------------------------------------- 4 bits


def _pack_blocks(name: str, parts: Parts) -> StoredTensor:
    """Combine weight (two numbers per byte), absmax: [blocks], quant_map: [16], and state (JSON in bytes).

    With double quantisation, absmax itself has one byte per block. nested_quant_map: [256] maps this byte to a fraction
    of nested_absmax: [blocks of absmax]; then an offset is added.
    """
    weight, absmax, quant_map = parts["weight"], parts["absmax"], parts["quant_map"]
    state = _read_state(parts["state"])
    shape, block, offset = state["shape"], state["blocksize"], 0.0
    count = prod(shape)
    require(weight.dtype == torch.uint8 and prod(weight.shape) == -(-count // 2), weight, f"uint8, half of {count}")
    require(quant_map.dtype.is_floating_point and quant_map.shape == (16,), quant_map, "16 floats")
    num_blocks = -(-count // block)
    if "nested_absmax" in parts:
        outer = state["nested_blocksize"]
        nested, levels = parts["nested_absmax"], parts.get("nested_quant_map")
        require(absmax.dtype == torch.uint8 and absmax.shape == (num_blocks,), absmax, f"{num_blocks} of uint8")
        is_right = nested.dtype.is_floating_point and nested.shape == (-(-num_blocks // outer),)
        require(is_right, nested, f"{-(-num_blocks // outer)} floats")
        is_right = levels is not None and levels.dtype.is_floating_point and levels.shape == (256,)
        require(is_right, levels or nested, "nested_quant_map of 256 floats")
        offset = state["nested_offset"]
    else:
        outer = block
        require(
            absmax.dtype.is_floating_point and absmax.shape == (num_blocks,),
            absmax,
            f"{num_blocks} floats, one per block",
        )
    unpack = partial(_unpack_blocks, name=name, shape=tuple(shape), block=block, outer=outer, offset=offset)
    return PackedTensor(name, torch.float32, tuple(shape), parts, unpack)


def _read_state(stored: FileTensor) -> dict[str, Any]:
    """Read the numbers of a quant_state; raise CheckpointError if they are missing or make no sense."""
    require(stored.dtype == torch.uint8 and stored.size_bytes <= _MAX_STATE_BYTES, stored, "JSON in bytes")
    state = parse_object(bytes(stored.read().tolist()), f"{stored.path}: {stored.name}")
    sizes = state.get("shape")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"{stored.path}: {stored.name} has shape={shown(sizes)}: expected two sizes")
    for key in ("blocksize", "nested_blocksize"):
        if type(size := state.get(key, 64)) is not int or size not in _BLOCK_SIZES:
            raise CheckpointError(f"{stored.path}: {stored.name} has {key}={shown(state[key])}, which cannot be read")
    offset = state.get("nested_offset", 0.0)
    if not isinstance(offset, float | int) or not abs(offset) <= _MOST_OFFSET:
        raise CheckpointError(
            f"{stored.path}: {stored.name} has nested_offset={shown(offset)}: expected a finite number"
        )
    return {"blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.0} | state


def _unpack_blocks(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    quant_map: torch.Tensor,
    state: torch.Tensor,
    nested_absmax: torch.Tensor | None = None,
    nested_quant_map: torch.Tensor | None = None,
    *,
    name: str,
    shape: tuple[int, ...],
    block: int,
    outer: int,
    offset: float,
) -> torch.Tensor:
    if nested_absmax is not None and nested_quant_map is not None:
        largest = nested_absmax.float().repeat_interleave(outer)[: len(absmax)]
        absmax = nested_quant_map.float()[absmax.long()] * largest + offset
    largest, levels = require_finite(absmax, name), require_finite(quant_map, name)
    count, pairs = prod(shape), weight.flatten()
    unpacked = torch.empty(count, dtype=torch.float32)
    for start in range(0, count, _TILE):  # a tile is a whole number of blocks
        some = pairs[start // 2 : (start + _TILE) // 2]
        numbers = levels[torch.stack([some >> 4, some & 15], -1).flatten().long()]
        tile = unpacked[start : start + _TILE]
        steps = largest[start // block : (start + _TILE) // block].repeat_interleave(block)
        torch.mul(numbers[: len(tile)], steps[: len(tile)], out=tile)
    return unpacked.view(shape)
