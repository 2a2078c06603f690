"""Which layers int4 holds in 8 bits, and that blocks are loaded so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.describing import describe
from swarm_models.kernels.int4_linear import Int4Weight, KernelInt4Weight
from swarm_models.kernels.int8_linear import Int8Weight
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization import Report, quantize_
from swarm_models.quantization.eight_bits import eight_bit_layers
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.weight_cache import WeightCache
from swarm_server.graph.step_graph import StepGraphs
from tests.zoo import save_checkpoint

CPU = torch.device("cpu")
DENSE = dict(
    hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=4, num_hidden_layers=12
)


def test_values_and_keys_come_first_then_down_products_of_the_outer_blocks() -> None:
    family = describe(AutoConfig.for_model("llama", **DENSE))
    layers = eight_bit_layers(family)
    assert all({"self_attn.v_proj", "self_attn.k_proj"} <= names for names in layers)
    outer = [index for index, names in enumerate(layers) if "mlp.down_proj" in names]
    assert outer == [0, 1, 10, 11]
    weights = [dict(linears) for linears in family.linears]
    total = sum(sum(block.values()) for block in weights)
    inputs = {"self_attn.v_proj": 1024, "self_attn.k_proj": 1024, "mlp.down_proj": 4096}
    more = sum(weights[index][name] * (3.5 + 32 / inputs[name]) for index, names in enumerate(layers) for name in names)
    assert 4.8 < 4.5 + more / total < 5.0


@pytest.mark.parametrize(
    ("model_type", "chosen"),
    [
        ("gpt2", {"mlp.c_proj"}),
        ("gpt_neox", {"mlp.dense_4h_to_h"}),
        (
            "deepseek_v3",
            {f"self_attn.{name}" for name in ("kv_a_proj_with_mqa", "kv_b_proj")}
            | {"mlp.shared_experts.down_proj", "mlp.down_proj"},
        ),
        ("qwen3_moe", {"self_attn.k_proj", "self_attn.v_proj"}),
    ],
)
def test_names_of_other_families(model_type: str, chosen: set[str]) -> None:
    family = describe(AutoConfig.for_model(model_type))
    assert set().union(*eight_bit_layers(family)) == chosen


def load(directory: Path, method: str, cache: WeightCache, span: Span | None = None) -> tuple[BlockStack, Report]:
    checkpoint = ModelCheckpoint.open(directory)
    layers, report = PackedLayers(cache, method, CPU, torch.float32, checkpoint.family), Report(method)

    def prepare(block: torch.nn.Module, index: int) -> None:
        nonlocal report
        report += quantize_(block, method, CPU, torch.float32, eight_bits=layers.eight_bits(index))

    stack = load_blocks(checkpoint, span or checkpoint.family.all_blocks, transform=prepare, layers=layers)
    return stack, report + layers.report


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_blocks_have_the_chosen_layers_in_8_bits_and_the_others_in_4(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path / "model")
    cache = WeightCache(1 << 30, tmp_path / "cache")
    family = ModelCheckpoint.open(tmp_path / "model").family
    chosen = eight_bit_layers(family)
    assert any(chosen)
    eight, _ = load(tmp_path / "model", "int8", WeightCache(0))
    first, report = load(tmp_path / "model", "int4", cache)
    second, repeated = load(tmp_path / "model", "int4", cache)  # packed as the first start kept them
    assert (report.num_linears, report.quantised_bytes) == (repeated.num_linears, repeated.quantised_bytes)
    for stack in (first, second):
        for index in family.all_blocks:
            for path, layer in stack.original(index).named_modules():
                if isinstance(layer, QuantizedLinear):
                    assert isinstance(layer.quantized, Int8Weight if path in chosen[index] else Int4Weight), path
                    if path in chosen[index]:
                        expected = eight.original(index).get_submodule(path).weight
                        assert torch.equal(layer.weight, expected)
    hidden = torch.randn(1, 5, first.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first(hidden), second(hidden))


def test_a_server_of_some_blocks_decides_as_one_of_all(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    whole, _ = load(tmp_path, "int4", WeightCache(0))
    part, _ = load(tmp_path, "int4", WeightCache(0), Span(1, 3))
    kinds = [[type(module) for module in stack.original(2).modules()] for stack in (whole, part)]
    assert kinds[0] == kinds[1]


@pytest.mark.skipif(not KernelInt4Weight.is_available(), reason="no compiled kernel")
def test_decode_steps_of_both_kinds_are_programs(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    stack, _ = load(tmp_path, "int4", WeightCache(0))
    kinds = {type(module.quantized) for module in stack.modules() if isinstance(module, QuantizedLinear)}
    assert {KernelWeight, KernelInt4Weight} == kinds
    assert StepGraphs(stack, 16).refusal is None
