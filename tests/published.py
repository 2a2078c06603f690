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

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
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


def assert_read(checkpoint: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that the tensors of a checkpoint are these, bit for bit."""
    read = ModelCheckpoint.open(checkpoint).read(lambda name: True)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name


def damage(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Change a stored tensor, or remove it."""
    stored = read_shards(directory)
    part = stored.pop(name)
    write_shards(directory, stored if change is None else stored | {name: change(part).contiguous()})


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


# ---------------------------------------------------------------- integers in groups


def quantize_groups(
    weight: torch.Tensor, group: int, bits: int, symmetric: bool, group_of: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q from 0 to 2**bits - 1: [out, in], scale and zero point: [out, groups]), ``weight ~ (q - zero) * scale``."""
    width = weight.shape[1]
    group_of = torch.arange(width) // group if group_of is None else group_of
    top = 2**bits - 1
    scale, zero = torch.empty(len(weight), width // group), torch.empty(len(weight), width // group)
    for number in range(width // group):
        part = weight[:, group_of == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scale[:, number], zero[:, number] = torch.maximum(-low, high) / (top // 2), 2 ** (bits - 1)
        else:
            scale[:, number] = (high - low) / top
            zero[:, number] = (-low / scale[:, number]).round()
    scale = scale.half().float()
    q = (weight / scale[:, group_of] + zero[:, group_of]).round().clamp(0, top)
    return q.int(), scale, zero.int()


def dequantized(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    return (q - zero[:, group_of]).float() * scale[:, group_of]


def words(integers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """integers: [..., n] -> int32 words along the last dimension, padded with zeros; ``order``: which comes first."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(integers.long(), (0, -integers.shape[-1] % per_word))
    groups = padded.unflatten(-1, (-1, per_word))
    word = sum(groups[..., which] << bits * place for place, which in enumerate(order or range(per_word)))
    return (word - (word >= 2**31) * 2**32).int()


def gptq(
    weight: torch.Tensor,
    *,
    group: int = 16,
    bits: int = 4,
    version: int = 1,
    symmetric: bool = False,
    order: bool = False,
) -> Packed:
    width = weight.shape[1]
    group_of = torch.arange(width) // group
    if order:
        group_of = group_of[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    q, scale, zero = quantize_groups(weight, group, bits, symmetric, group_of)
    stored_zero = (zero - 1) % 2**bits if version == 1 else zero
    parts = {
        ".qweight": words(q, bits).T,
        ".qzeros": words(stored_zero.T, bits),
        ".scales": scale.T.half(),
        ".g_idx": group_of.int(),
    }
    return parts, dequantized(q, scale, zero, group_of)


def gptq_config(bits: int = 4, **changes: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": False, "sym": False, **changes}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def awq(weight: torch.Tensor, group: int = 16, *, zero_point: bool = True) -> Packed:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    q, scale, zero = quantize_groups(weight, group, 4, symmetric=not zero_point)
    parts = {".qweight": words(q.T, 4, order), ".scales": scale.T.half()}
    if zero_point:
        parts[".qzeros"] = words(zero.T, 4, order)
    return parts, dequantized(q, scale, zero, torch.arange(weight.shape[1]) // group)


def compressed_config(format: str, bits: int, kind: str = "int", **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def compressed_words(
    weight: torch.Tensor, group: int, bits: int, *, symmetric: bool = True, order: bool = False
) -> Packed:
    width = weight.shape[1]
    group_of = torch.arange(width) // group
    if order:
        group_of = group_of[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    q, scale, zero = quantize_groups(weight, group, bits, symmetric, group_of)
    parts = {".weight_packed": words(q, bits), ".weight_scale": scale, ".weight_shape": torch.tensor(weight.shape)}
    parts |= {} if symmetric else {".weight_zero_point": words(zero.T, bits).T}
    return parts | ({".weight_g_idx": group_of.int()} if order else {}), dequantized(q, scale, zero, group_of)


def int8_rows(weight: torch.Tensor, group: int | None = None, *, symmetric: bool = True) -> Packed:
    group = group or weight.shape[1]
    q, scale, zero = quantize_groups(weight, group, 8, symmetric)
    parts = {".weight": (q - 128).to(torch.int8), ".weight_scale": scale}
    parts |= {} if symmetric else {".weight_zero_point": (zero - 128).to(torch.int8)}
    return parts, dequantized(q, scale, zero, torch.arange(weight.shape[1]) // group)


# ---------------------------------------------------------------- bitsandbytes


def bitsandbytes_4bit(weight: torch.Tensor, kind: str, nested: bool, blocksize: int = 64) -> Packed:
    """By the package's own quantiser, and its own reader."""
    from bitsandbytes import functional

    q, state = functional.quantize_4bit(weight, blocksize=blocksize, compress_statistics=nested, quant_type=kind)
    parts = {f".weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    return {".weight": q, **parts}, functional.dequantize_4bit(q, state)


def bitsandbytes_int8(weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax(1)
    q = (weight * (127 / scale[:, None])).round().to(torch.int8)
    parts = {".weight": q, ".SCB": scale, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, q.float() * (scale / 127)[:, None]


def bitsandbytes_config(bits: int) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
