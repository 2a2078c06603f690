"""Tiny checkpoints in the formats in which large models are published, packed by closed formulas.

A packer takes a linear weight [out, in] and returns the tensors that are stored for it, by the ends of their names, and
the weight that a reader must find in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.zoo import save_checkpoint

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Packer = Callable[[torch.Tensor], Packed]
FP8_MAX = 448.0
MXFP4_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def publish(
    directory: Path,
    quantization_config: object,
    pack: Packer,
    *,
    name: str = "llama",
    ends: tuple[str, ...] = ("_proj.weight",),
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Saves a zoo member whose tensors with these ends are packed; returns what is to be read, by name.

    A weight and its scale lie in different files wherever that can be. The ends of the packed tensors' names replace
    ``.weight``, or are added to names without it.
    """
    save_checkpoint(name, directory, max_shard_size="1GB", dtype=dtype, **overrides)
    stored: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for full, tensor in load_file(directory / "model.safetensors").items():
        if full.endswith(ends):
            parts, expected[full] = pack(tensor.float())
            stored |= {full.removesuffix(".weight") + end: part.contiguous() for end, part in parts.items()}
        else:
            stored[full] = expected[full] = tensor
    (directory / "model.safetensors").unlink()
    write_shards(directory, stored)
    edit_config(directory, quantization_config=quantization_config)
    return expected


def write_shards(directory: Path, stored: Mapping[str, torch.Tensor], num_shards: int = 2) -> None:
    names, weight_map = sorted(stored), {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file({name: stored[name] for name in names[number::num_shards]}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[number::num_shards], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_shards(directory: Path) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        stored |= load_file(shard)
    return stored


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---------------------------------------------------------------- fp8


def fp8_config(block: tuple[int, int] | None = None) -> dict[str, Any]:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return config if block is None else {**config, "weight_block_size": list(block)}


def fp8_blocks(weight: torch.Tensor, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32) -> Packed:
    """A scale for each block, those at the edges being smaller."""
    rows, width = weight.shape
    q, unpacked = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-rows // block[0]), -(-width // block[1]), dtype=scale_dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / FP8_MAX
            q[place] = (weight[place] / scales[i, j].float()).to(torch.float8_e4m3fn)
            unpacked[place] = q[place].float() * scales[i, j].float()
    return {".weight": q, ".weight_scale_inv": scales}, unpacked


def fp8_rows(weight: torch.Tensor, shape: tuple[int, ...], end: str = ".weight_scale") -> Packed:
    """A scale for each row if the shape has as many numbers, else one."""
    per_row = torch.Size(shape).numel() == len(weight) > 1
    scale = (weight.abs().amax(1, keepdim=True) if per_row else weight.abs().max()) / FP8_MAX
    q = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": q, end: scale.reshape(shape), ".input_scale": torch.tensor(1.0)}, q.float() * scale


# ---------------------------------------------------------------- mxfp4


MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def mxfp4_experts(weight: torch.Tensor) -> Packed:
    """weight: [experts, in, out], of which each 32 inputs share an exponent, stored as [experts, out, in / 32]."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / 2 ** exponents[..., None]
    levels = (scaled.abs()[..., None] - MXFP4_LEVELS).abs().argmin(-1)
    codes = (levels + 8 * (scaled < 0)).to(torch.uint8)
    unpacked = MXFP4_LEVELS[levels] * scaled.sign() * 2 ** exponents[..., None]
    parts = {"_blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "_scales": (exponents + 127).to(torch.uint8)}
    return parts, unpacked.flatten(2).transpose(1, 2)
