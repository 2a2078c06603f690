"""What the products with int8 and int4 weights have in common, with each instruction set and without the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from swarm_models.kernels.int4_linear import KernelInt4Weight, PlainInt4Weight, quantize_groups
from swarm_models.kernels.int8_linear import quantize_rows
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.library import kernel
from swarm_models.kernels.quantized_linear import QuantizedLinear, QuantizedWeight, swapped_weights
from tests.unit.models.kernels import test_int4_linear, test_kernel_weight
from tests.unit.models.kernels.conftest import inputs, instructions, on

NAMES = test_int4_linear.NAMES
WEIGHTS: dict[str, Callable] = {
    "int8": lambda *shape: KernelWeight(*test_kernel_weight.weight_of(*shape)),
    "int4": lambda *shape: KernelInt4Weight(*test_int4_linear.weight_of(*shape)),
    "torch": lambda *shape: PlainInt4Weight(*test_int4_linear.weight_of(*shape)),
}


@pytest.fixture(params=[*((kind, name) for kind in ("int8", "int4") for name in NAMES), ("torch", "")], ids="-".join)
def weight_of(request) -> Iterator[Callable]:
    kind, name = request.param
    if not name:
        yield WEIGHTS[kind]
        return
    with instructions(kernel(), name):
        yield WEIGHTS[kind]


def test_weights_are_swapped_back_where_swapping_fails() -> None:
    layers = [QuantizedLinear(WEIGHTS["torch"](5, 32)) for _ in range(3)]
    weights = [layer.quantized for layer in layers]

    def other(weight: QuantizedWeight) -> QuantizedWeight:
        if weight is weights[2]:
            raise MemoryError("no room for another weight")
        return WEIGHTS["torch"](5, 32)

    with pytest.raises(MemoryError), swapped_weights(layers, other):
        pytest.fail("the third layer has no other weight")
    assert all(layer.quantized is weight for layer, weight in zip(layers, weights, strict=True))
    with swapped_weights([*layers[:2], layers[0]], other):  # one layer twice
        assert layers[0].quantized is not weights[0] and layers[1].quantized is not weights[1]
    assert all(layer.quantized is weight for layer, weight in zip(layers, weights, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_spoils_no_other(weight_of, bad):
    weight = weight_of(100, 70)
    x = inputs(7, 70)
    alone = weight.matmul(x)
    x[4, 69] = bad
    y = weight.matmul(x)
    others = [0, 1, 2, 3, 5, 6]
    assert y[4].isnan().all()
    assert torch.equal(y[others], alone[others])


@pytest.mark.skipif(not NAMES, reason="the kernel was not compiled")
@pytest.mark.parametrize("kind", [KernelWeight, KernelInt4Weight])
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_share_an_input_give_what_each_gives(kind, name, threads):
    few, many = [(300, 512), (65, 512), (3, 512), (100, 512)], [(2048, 512), (65, 512), (3, 512), (1000, 512)]
    with instructions(kernel(), name):
        for rows, shapes in ((1, many), (3, many), (300, few)):
            weights = [
                WEIGHTS["int8" if kind is KernelWeight else "int4"](*shape, seed) for seed, shape in enumerate(shapes)
            ]
            x = inputs(rows, 512)
            with on(threads):
                shared = kind.matmul_shared(x, weights)
            for weight, together in zip(weights, shared, strict=True):
                assert torch.equal(together, weight.matmul(x))


def test_tiny_and_huge_numbers_are_finite(weight_of):
    weight = weight_of(8, 8)
    for factor in (1e-45, 1e-38, 1e30):
        assert not weight.matmul(inputs(1, 8).abs().clamp(min=1) * factor).isnan().any()


@pytest.mark.parametrize(
    ("implementation", "quantize"),
    [
        *([(KernelWeight, quantize_rows), (KernelInt4Weight, quantize_groups)] if NAMES else []),
        (PlainInt4Weight, quantize_groups),
    ],
)
def test_linears_differentiate_through_it(implementation, quantize):
    linear = QuantizedLinear(implementation(*quantize(torch.randn(30, 20))), torch.randn(30))
    x = torch.randn(2, 4, 20, requires_grad=True)
    linear(x).square().sum().backward()
    expected = 2 * (x.detach() @ linear.weight.T + linear.bias) @ linear.weight
    assert x.grad is not None
    assert (x.grad - expected).norm() < 1e-3 * expected.norm()  # 14 bits of activations and gradients
    assert linear(x.bfloat16()).dtype == torch.bfloat16
