"""Layers and experts that are packed as they are read have the numbers of whole blocks, and take less memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.formats.packed import PackedTensor
from swarm_models.quantization import quantize_
from swarm_models.quantization.experts import QuantizedExperts
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.weight_cache import WeightCache
from tests.gguf_files import write_gguf
from tests.marks import SLOW
from tests.published import (
    MXFP4_CONFIG,
    compressed_config,
    compressed_words,
    fp8_blocks,
    fp8_config,
    fp8_rows,
    mxfp4_experts,
    publish,
)
from tests.zoo import save_checkpoint

CPU = torch.device("cpu")
BLOCK = (16, 16)
NUM_BLOCKS = 3  # of deepseek_v3, the last one has experts
ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 64}
EXPERTS_ENDS = (".gate_up_proj", ".down_proj")


def load(path: Path, method: str, in_parts: bool, dtype: torch.dtype = torch.float32) -> BlockStack:
    def transform(block: torch.nn.Module, _index: int) -> None:
        quantize_(block, method, CPU, dtype)

    layers = PackedLayers(WeightCache(0), method, CPU, dtype) if in_parts else None
    checkpoint = ModelCheckpoint.open(path)
    return load_blocks(checkpoint, checkpoint.family.all_blocks, dtype=dtype, transform=transform, layers=layers)


def fp8(name: str, **sizes: int) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        pack = partial(fp8_blocks, block=BLOCK)
        publish(directory, fp8_config(BLOCK), pack, name=name, num_hidden_layers=NUM_BLOCKS, **sizes)
        return directory

    return make


def mxfp4(directory: Path) -> Path:
    publish(directory, MXFP4_CONFIG, mxfp4_experts, name="gpt_oss", ends=EXPERTS_ENDS, num_hidden_layers=2)
    return directory


def plain(name: str, **overrides: object) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        save_checkpoint(name, directory, dtype=torch.bfloat16, **overrides)
        return directory

    return make


def fp8_of_rows(directory: Path) -> Path:
    publish(directory, fp8_config(), lambda weight: fp8_rows(weight, (len(weight), 1)), num_hidden_layers=1)
    return directory


def gguf(name: str, **sizes: Any) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        directory.mkdir()
        write_gguf(directory / "tiny.gguf", name=name, type="Q8_0", num_hidden_layers=2, **sizes)
        return directory / "tiny.gguf"

    return make


NEEDS_GGUF = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")
CHECKPOINTS = [
    pytest.param(fp8("llama"), id="fp8"),
    pytest.param(fp8_of_rows, id="fp8 of rows"),
    pytest.param(fp8("deepseek_v3"), id="fp8 of each expert"),
    pytest.param(plain("qwen2", num_hidden_layers=1), id="biases"),
    pytest.param(mxfp4, id="mxfp4 of all experts"),
    pytest.param(plain("mixtral", num_hidden_layers=2), id="bf16 of each expert"),
    pytest.param(plain("nemotron_h"), id="experts without a gate", marks=SLOW),
    pytest.param(plain("lfm2_moe"), id="lfm2_moe", marks=SLOW),
    pytest.param(plain("llama4_text"), id="llama4_text", marks=SLOW),
    pytest.param(plain("granitemoehybrid"), id="experts under another name", marks=SLOW),
    pytest.param(gguf("qwen3_moe", **ALL_SPARSE), id="gguf", marks=NEEDS_GGUF),
    pytest.param(gguf("llama", hidden_size=128, head_dim=32), id="gguf whose heads are permuted", marks=NEEDS_GGUF),
]


@pytest.mark.parametrize("make", CHECKPOINTS)
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_numbers_are_those_of_whole_blocks(tmp_path: Path, make: Callable[[Path], Path], method: str) -> None:
    path = make(tmp_path / "model")
    stack, expected = load(path, method, in_parts=True), load(path, method, in_parts=False)
    assert_same(stack, expected)
    hidden = torch.randn(1, 5, stack.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(stack(hidden), expected(hidden))


def test_the_dtype_of_computation_comes_before_rounding(tmp_path: Path) -> None:
    path = fp8("qwen3_moe")(tmp_path / "model")
    assert_same(load(path, "int8", True, torch.bfloat16), load(path, "int8", False, torch.bfloat16))


def assert_same(stack: BlockStack, expected: BlockStack) -> None:
    modules = dict(expected.blocks.named_modules())
    for name, module in stack.blocks.named_modules():
        assert type(module) is type(modules[name]), name
        if hasattr(module, "quantized"):
            assert torch.equal(module.quantized.dequantize(), modules[name].quantized.dequantize()), name


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (fp8("llama", hidden_size=128, intermediate_size=256), 64 * 256),  # rows of the widest matrix
        (fp8("qwen3_moe"), 96 * 64),  # gate and up of an expert
        (mxfp4, 64 * 192),
    ],
)
def test_at_most_an_expert_is_held_in_full_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], most: int
) -> None:
    sizes: list[int] = []
    path = make(tmp_path / "model")
    tiles, read = PackedTensor.tiles, PackedTensor.read

    def counted(stored: PackedTensor, min_rows: int):
        for tile in tiles(stored, min_rows):
            sizes.append(tile.numel())
            yield tile

    monkeypatch.setattr(PackedTensor, "tiles", counted)
    monkeypatch.setattr(PackedTensor, "read", lambda stored: sizes.append(10**9) or read(stored))
    load(path, "int8", in_parts=True)
    assert sizes and max(sizes) <= most


def test_integers_of_experts_are_kept(tmp_path: Path) -> None:
    """As of linear layers: gate and up, which are stored apart, become one matrix."""
    config = compressed_config("pack-quantized", 4, strategy="group", group_size=32)
    pack = partial(compressed_words, group=32, bits=4)
    expected = publish(tmp_path, config, pack, name="qwen3_moe", num_hidden_layers=1, **ALL_SPARSE)
    (experts,) = [part for part in load(tmp_path, "int4", True).blocks.modules() if isinstance(part, QuantizedExperts)]
    for number, (up, down) in enumerate(zip(experts.up, experts.down, strict=True)):
        first, second, third = (
            expected[f"model.layers.0.mlp.experts.{number}.{kind}_proj.weight"] for kind in ("gate", "up", "down")
        )
        for layer, weight in ((up, torch.cat([first, second])), (down, third)):
            assert (layer.quantized.dequantize() - weight).norm() < weight.norm() / 32


def test_without_quantisation_experts_are_those_of_transformers(tmp_path: Path) -> None:
    path = fp8("qwen3_moe")(tmp_path / "model")
    checkpoint = ModelCheckpoint.open(path)
    layers = PackedLayers(WeightCache(0), "none", CPU, torch.float32)
    stack = load_blocks(checkpoint, Span(1, 2), transform=lambda block, index: None, layers=layers)
    assert all(parameter.device == CPU for parameter in stack.blocks.parameters())
