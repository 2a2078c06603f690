"""What is stored in the integers or FP8 codes that a server computes with is not rounded a second time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.kernels.int4_linear import Int4Weight
from swarm_models.kernels.int8_linear import Int8Weight
from swarm_models.quantization import quantize_
from swarm_models.quantization.eight_bits import eight_bit_layers
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.weight_cache import WeightCache
from tests.published import (
    AWQ_CONFIG,
    Packed,
    Packer,
    awq,
    bitsandbytes_config,
    bitsandbytes_int8,
    compressed_config,
    compressed_words,
    fp8_blocks,
    fp8_config,
    fp8_rows,
    gptq,
    gptq_config,
    publish,
)

CPU = torch.device("cpu")
PACKED = compressed_config("pack-quantized", 4, strategy="group")


def clipped_int8(weight: torch.Tensor) -> Packed:
    """int8 whose largest integers are not 127: rounding again would choose other scales."""
    scale = weight.abs().amax(1, keepdim=True) / 90
    q = (weight / scale).round().to(torch.int8)
    return {".weight": q, ".weight_scale": scale}, q.float() * scale


def gptq_with_zeros(weight: torch.Tensor) -> Packed:
    """As old AutoGPTQ writes it: every layer has a bias, also in models without."""
    stored, expected = gptq(weight, group=32)
    return {**stored, ".bias": torch.zeros(len(weight))}, expected


def linears(directory: Path, config: object, pack: Packer, method: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The linear layers of a block that was loaded with this quantisation, and their relative errors, by name."""
    expected = publish(directory, config, pack, num_hidden_layers=1, intermediate_size=128)
    checkpoint = ModelCheckpoint.open(directory)
    stack = load_blocks(
        checkpoint,
        Span(0, 1),
        transform=lambda block, index: quantize_(block, method, CPU, torch.float32, emulated=True),
        layers=PackedLayers(WeightCache(0), method, CPU, torch.float32, checkpoint.family),
    )
    layers = {name: layer for name, layer in stack.blocks[0].named_modules() if name.endswith("_proj")}
    found = {}
    for name, layer in layers.items():
        weight = expected[f"model.layers.0.{name}.weight"]
        found[name] = float((layer.quantized.dequantize() - weight).norm() / weight.norm())
    assert len(found) == 7
    return layers, found


def errors(directory: Path, config: object, pack: Packer, method: str) -> list[float]:
    """Relative, of each linear layer; all are in the bits of the checkpoint, those too that int4 would hold in 8."""
    layers, found = linears(directory, config, pack, method)
    assert len(set(map(type, layers.values()))) == 1
    return list(found.values())


@pytest.mark.parametrize(
    ("config", "pack"),
    [
        (compressed_config("int-quantized", 8), clipped_int8),
        (bitsandbytes_config(8), bitsandbytes_int8),
        (compressed_config("pack-quantized", 8), lambda weight: compressed_words(weight, weight.shape[1], 8)),
    ],
)
def test_int8_of_rows_is_kept(tmp_path: Path, config: object, pack: Packer) -> None:
    assert max(errors(tmp_path, config, pack, "int8")) < 1e-7


def test_the_smallest_integer_is_rounded_again(tmp_path: Path) -> None:
    """The kernels add products of pairs in 16 bits, for which -128 is too large."""

    def pack(weight: torch.Tensor) -> Packed:
        q = torch.full(weight.shape, -128, dtype=torch.int8)
        return {".weight": q, ".weight_scale": torch.ones(len(q), 1)}, q.float()

    assert max(errors(tmp_path, compressed_config("int-quantized", 8), pack, "int8")) < 1e-7


@pytest.mark.parametrize(
    ("config", "pack"),
    [
        (AWQ_CONFIG, partial(awq, group=32)),
        (AWQ_CONFIG, partial(awq, group=64)),
        (gptq_config(), partial(gptq, group=32)),
        (gptq_config(), gptq_with_zeros),
        (gptq_config(sym=True), partial(gptq, group=64, symmetric=True)),
        (PACKED, partial(compressed_words, group=32, bits=4)),
        (PACKED, partial(compressed_words, group=32, bits=4, symmetric=False)),
        (PACKED, lambda weight: compressed_words(weight, weight.shape[1], 4)),
    ],
)
def test_int4_keeps_integers_and_rounds_scales(tmp_path: Path, config: object, pack: Packer) -> None:
    assert max(errors(tmp_path, config, pack, "int4")) < 1 / 32


@pytest.mark.parametrize(
    ("config", "pack"),
    [
        (AWQ_CONFIG, partial(awq, group=16)),
        (gptq_config(), partial(gptq, group=32, order=True)),
        (gptq_config(8), partial(gptq, bits=8)),
        (compressed_config("float-quantized", 8, "float"), lambda weight: fp8_rows(weight, (len(weight), 1))),
    ],
)
def test_others_are_rounded_again_in_8_bits_where_int4_holds_8(tmp_path: Path, config: object, pack: Packer) -> None:
    layers, found = linears(tmp_path, config, pack, "int4")
    eight_bits = eight_bit_layers(ModelCheckpoint.open(tmp_path).family)[0]
    assert "self_attn.v_proj" in eight_bits
    for name, layer in layers.items():
        assert isinstance(layer.quantized, Int8Weight if name in eight_bits else Int4Weight), name
        assert found[name] < (0.01 if name in eight_bits else 0.15), name
    assert max(found.values()) > 1 / 32


def clipped_fp8(weight: torch.Tensor) -> Packed:
    """FP8 whose largest numbers are not 448: rounding again would choose other scales."""
    scale = (weight.abs().amax(1, keepdim=True) / 300).bfloat16()
    q = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": q, ".weight_scale": scale}, q.float() * scale


@pytest.mark.parametrize(
    ("config", "pack"),
    [
        (fp8_config(), clipped_fp8),
        (fp8_config(), lambda weight: fp8_rows(weight, (len(weight),))),
        (fp8_config(), lambda weight: fp8_rows(weight, (), ".weight_scale_inv")),
        (compressed_config("float-quantized", 8, "float"), clipped_fp8),
        (compressed_config("float-quantized", 8, "float"), lambda weight: fp8_rows(weight, (1,))),
    ],
)
def test_fp8_with_a_scale_per_row_or_tensor_is_kept(tmp_path: Path, config: object, pack: Packer) -> None:
    assert errors(tmp_path, config, pack, "fp8") == [0.0] * 7


def test_fp8_in_blocks_is_rounded_again_by_rows(tmp_path: Path) -> None:
    """The blocks' scales differ by 3 at most here. A number may then be off by half a step of e4m3, 1/16 of itself."""
    again = errors(tmp_path, fp8_config((32, 24)), lambda weight: fp8_blocks(weight, (32, 24)), "fp8")
    assert min(again) > 0.005 and max(again) < 1 / 32


def test_floats_of_five_bits_of_exponent_are_rounded_again(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> Packed:
        q = weight.to(torch.float8_e5m2)
        return {".weight": q, ".weight_scale": torch.ones(len(q), 1)}, q.float()

    assert 0 < max(errors(tmp_path, fp8_config(), pack, "fp8")) < 1 / 32
