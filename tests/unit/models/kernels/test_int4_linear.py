"""int4 weights, on every instruction set of this processor and without the kernel, against exact integers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from swarm_models.kernels.int4_linear import (
    GROUP,
    Int4Weight,
    KernelInt4Weight,
    PlainInt4Weight,
    fastest,
    quantize_groups,
    scales_and_zeros,
)
from swarm_models.kernels.library import kernel
from swarm_models.kernels.quantized_linear import QuantizedLinear
from tests.unit.models.kernels.conftest import inputs, instructions, on

NAMES = [] if (library := kernel()) is None else library.names
SHAPES = [(96, 64), (100, 1000), (37, 61), (5, 513), (3, 1), (1, 3), (64, 32), (65, 33), (300, 1025)]  # [out, in]
ROWS = (0, 1, 2, 3, 4, 5, 7, 9, 16, 33, 300)
needs_kernel = pytest.mark.skipif(kernel() is None, reason="the kernel was not compiled")


@pytest.fixture(params=[*NAMES, "torch"])
def implementation(request) -> Iterator[type[Int4Weight]]:
    """The kernel with each instruction set, and torch without it."""
    if request.param == "torch":
        yield PlainInt4Weight
    else:
        with instructions(kernel(), request.param):
            yield KernelInt4Weight


def weight_of(out: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and groups, each possible value of which may occur but for tiny and huge scales."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (out, width), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(100, 140, (out, -(-width // GROUP)), generator=generator)
    rest = torch.randint(0, 256, exponents.shape, generator=generator)
    return q, (exponents << 8 | rest).to(torch.int16)


def exact(x: torch.Tensor, q: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """x = unit * n; products with a group in exact integers, added up in fp32 in the order of the groups.

    Integers are in fp64, which has them exactly below 2**53, and multiplies far faster than int64.
    """
    top = x.abs().amax(1, True)
    n = torch.where(top > 0, x * (1 / (top / 8192)), 0).round().double()
    total = torch.zeros(len(x), len(q))
    for group, some in enumerate(torch.arange(x.shape[1]).split(GROUP)):
        bits = groups[:, group].long() & 0xFFFF
        scale = torch.ldexp(1 + (bits >> 4 & 15).double() / 16, (bits >> 8) - 127).float()
        product = n[:, some] @ (q[:, some].long() - (bits & 15)[:, None]).T.double()
        assert product.abs().max() < 2**24
        total += product.float() * scale
    return total * (top / 8192)


@cache
def exact_product(rows: int, shape: tuple[int, int]) -> torch.Tensor:
    return exact(inputs(rows, shape[1]), *weight_of(*shape)) if rows else torch.empty(0, shape[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_exact_integers(implementation, threads, shape):
    q, groups = weight_of(*shape)
    weight = implementation(q, groups)
    for rows in ROWS:
        with on(threads):
            output = weight.matmul(inputs(rows, shape[1]))
        assert torch.equal(output, exact_product(rows, shape)), rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_weight_and_gradients_are_those_of_the_formula(implementation, threads, shape):
    q, groups = weight_of(*shape)
    weight = implementation(q, groups)
    bits = (groups.long() & 0xFFFF).repeat_interleave(GROUP, 1)[:, : shape[1]]
    scale = torch.ldexp(1 + (bits >> 4 & 15).double() / 16, (bits >> 8) - 127)
    expected = (q.double() - (bits & 15)) * scale
    assert torch.equal(weight.dequantize().double(), expected)
    for rows in (0, 1, 5, 40):
        grad = inputs(rows, shape[0])
        with on(threads):
            found = weight.matmul_grad(grad)
        torch.testing.assert_close(
            found.double(),
            grad.double() @ expected,
            rtol=1e-5,
            atol=1e-5 * float(expected.abs().max() * (1 + grad.abs().sum())),
        )


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 9, 40])
def test_no_bit_of_a_row_depends_on_the_others(implementation, rows):
    weight = implementation(*weight_of(130, 200))
    x = inputs(rows, 200)
    y = weight.matmul(x)
    assert torch.equal(torch.cat([weight.matmul(row[None]) for row in x]), y)
    assert torch.equal(weight.matmul(x.flip(0)), y.flip(0))


@needs_kernel
def test_packed_weights_of_whole_strips_can_be_joined():
    chosen = kernel()
    assert chosen is not None
    packed = []
    for q, groups in (parts := [weight_of(128, 100, 1), weight_of(64, 100, 2), weight_of(70, 100, 3)]):
        packed.append(torch.empty(KernelInt4Weight.packed_bytes(*q.shape), dtype=torch.uint8))
        chosen.pack4(q, groups, packed[-1])
    q, groups = (torch.cat(same) for same in zip(*parts, strict=True))
    whole = torch.empty(KernelInt4Weight.packed_bytes(*q.shape), dtype=torch.uint8)
    chosen.pack4(q, groups, whole)
    assert torch.equal(torch.cat(packed), whole)


@pytest.mark.parametrize("shape", [(5, 64), (300, 100), (2, 31), (3, 1)], ids=str)
def test_weights_are_rounded_to_the_nearest_of_sixteen_levels(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = weight[0].abs() + 3  # zero is below the range of some groups
    q, groups = quantize_groups(weight)
    scales, zeros = (part.repeat_interleave(GROUP, 1)[:, : shape[1]] for part in scales_and_zeros(groups))
    levels = (torch.arange(16.0)[:, None, None] - zeros) * scales
    distances = (levels - weight).abs()
    chosen = distances.gather(0, q.long()[None])[0]
    torch.testing.assert_close(chosen, distances.amin(0), rtol=1e-5, atol=1e-7)
    span = torch.stack([part.amax(1) - part.amin(1) for part in weight.clone().split(GROUP, 1)], 1)
    widest = torch.maximum(span, torch.stack([part.abs().amax(1) for part in weight.split(GROUP, 1)], 1))
    steps = scales_and_zeros(groups)[0]
    assert (steps <= widest / 15 * 1.01).all() and (steps >= widest / 15 * 0.93).all()


def test_zeros_and_strided_weights_of_other_dtypes_are_kept():
    weight = torch.randn(40, 70).bfloat16()
    weight[3] = 0
    weight[5, 32:64] = 0
    linear = QuantizedLinear(fastest()(*quantize_groups(weight)))
    assert (linear.weight[3] == 0).all() and (linear.weight[5, 32:64] == 0).all()
    assert torch.equal(fastest()(*quantize_groups(weight.T.contiguous().T)).dequantize(), linear.weight)


@pytest.mark.parametrize("outliers", [False, True])
def test_errors_are_those_of_the_weight_alone(implementation, outliers):
    """Activations keep 14 bits, whatever outliers there are: what is left is the rounding of the weight."""
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(256, 512, generator=generator), torch.randn(20, 512, generator=generator)
    if outliers:
        x[:, 7] *= 60
    quantised = implementation(*quantize_groups(weight))
    expected = x.double() @ weight.double().T
    error = (quantised.matmul(x).double() - expected).norm() / expected.norm()
    rounded = (x.double() @ quantised.dequantize().double().T - expected).norm() / expected.norm()
    assert abs(error - rounded) < 0.02 * rounded
    assert outliers or 0.07 < error < 0.09  # a step of 4.1 / 15 standard deviations, divided by the root of 12
