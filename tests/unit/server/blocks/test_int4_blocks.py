"""Blocks in int4, fused experts and transposed layers included, against blocks with the dequantised weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from swarm_models.kernels.int4_linear import KernelInt4Weight, PlainInt4Weight
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization import METHODS, quantize_
from swarm_models.quantization.experts import QuantizedExperts
from tests.unit.models.quantization.test_quantization import BLOCKS, CPU, MOE, error, family, matrices

NEEDS_KERNEL = pytest.mark.skipif(not KernelInt4Weight.is_available(), reason="the kernel was not compiled")
INT4_WEIGHTS = [pytest.param(KernelInt4Weight, marks=NEEDS_KERNEL), PlainInt4Weight]


@pytest.mark.parametrize("weight", INT4_WEIGHTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-7b", *MOE])
def test_int4_blocks_are_those_of_the_dequantised_weights(name, weight):
    original = family(name)
    quantised, report = original.quantised(BLOCKS - 1, "int4", int4_weight=weight)
    reference = copy.deepcopy(original.blocks[BLOCKS - 1])
    with torch.no_grad():
        for name_, part in reference.named_modules():
            if isinstance(twin := _twin(quantised, name_), QuantizedLinear):
                transposed = type(part).__name__ == "Conv1D"
                part.weight.copy_(twin.weight.T if transposed else twin.weight)
            elif isinstance(twin, QuantizedExperts):
                for parameter, linears in ((twin.layout.up, twin.up), (twin.layout.down, twin.down)):
                    weights = torch.stack([linear.weight for linear in linears])
                    getattr(part, parameter).copy_(weights.mT if twin.layout.transposed else weights)
    output, expected = original.run(quantised, BLOCKS - 1), original.run(reference, BLOCKS - 1)
    assert error(output, expected) < 1e-3  # 14 bits of activations
    assert 1e-3 < error(output, original.outputs[BLOCKS - 1]) < 0.25
    assert (report.num_linears, report.num_expert_weights) == matrices(original.blocks[BLOCKS - 1])
    assert report.method in METHODS


def _twin(block: nn.Module, name: str) -> nn.Module | None:
    try:
        return block.get_submodule(name)
    except AttributeError:  # within experts
        return None


def test_int4_weights_take_nine_sixteenths_of_a_byte():
    report = quantize_(nn.Sequential(nn.Linear(256, 128)), "int4", CPU, torch.float32)
    assert report.quantised_bytes == 9 / 16 * report.quantised_params


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_gradient_through_int4_blocks(name):
    original = family(name)
    quantised, _ = original.quantised(1, "int4")
    gradients = []
    for block in (quantised, original.blocks[1]):
        hidden = original.inputs[1][0].detach().clone().requires_grad_()
        original.run(block, 1, hidden).sum().backward()
        gradients.append(hidden.grad)
    assert error(*gradients) < 0.25
