"""The C++ kernel, on every instruction set of this processor, against its formula in exact integers."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.library import kernel
from tests.unit.models.kernels.conftest import inputs, instructions, on

pytestmark = pytest.mark.skipif(kernel() is None, reason="the kernel was not compiled")
NAMES = [] if (library := kernel()) is None else library.names
SHAPES = [(96, 64), (100, 1000), (37, 61), (5, 513), (3, 1), (1, 3), (64, 4), (65, 5), (700, 1025)]  # [out, in]
ROWS = (0, 1, 2, 3, 4, 5, 7, 16, 300)


@pytest.fixture(params=NAMES)
def isa(request) -> Iterator[str]:
    with instructions(kernel(), request.param):
        yield request.param


def exact(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x = unit * (128 * hi + lo) per row, the digits' products with q in exact integers: every bit is determined.

    Integers are in fp64, which has them exactly below 2**53, and multiplies far faster than int64.
    """
    top = x.abs().amax(1, True)
    unit = top / 8192
    n = torch.where(top > 0, x * (1 / unit), 0).round().long()
    hi = (n + 64) >> 7
    lo = n - 128 * hi
    q = q.T.double()
    return ((hi.double() @ q).float() * 128 + (lo.double() @ q).float()) * unit * scale


def weight_of(out: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-128, 128, (out, width), dtype=torch.int8, generator=generator)
    return q, torch.rand(out, generator=generator) + 0.1


@cache
def exact_product(rows: int, shape: tuple[int, int]) -> torch.Tensor:
    return exact(inputs(rows, shape[1]), *weight_of(*shape)) if rows else torch.empty(0, shape[0])


@cache
def exact_gradient(rows: int, shape: tuple[int, int]) -> torch.Tensor:
    q, scale = weight_of(*shape)
    return exact(inputs(rows, shape[0]) * scale, q.T, torch.ones(shape[1])) if rows else torch.empty(0, shape[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_exact_integers(isa, threads, shape):
    q, scale = weight_of(*shape)
    weight = KernelWeight(q, scale)
    for rows in ROWS:
        with on(threads):
            output = weight.matmul(inputs(rows, shape[1]))
        assert torch.equal(output, exact_product(rows, shape)), rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_exact_integers(isa, threads, shape):
    q, scale = weight_of(*shape)
    weight = KernelWeight(q, scale)
    for rows in ROWS:
        with on(threads):
            gradient = weight.matmul_grad(inputs(rows, shape[0]))
        assert torch.equal(gradient, exact_gradient(rows, shape)), rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_weight_can_be_read_back(isa, shape):
    q, scale = weight_of(*shape)
    weight = KernelWeight(q, scale)
    assert torch.equal(torch.cat([tile for _, tile, _ in weight.tiles()]), q)
    assert torch.equal(weight.dequantize(), q * scale[:, None])


def test_an_unknown_instruction_set_is_refused():
    chosen = kernel()
    assert chosen is not None
    with pytest.raises(ValueError, match=r"choose one of .*generic"):
        chosen.choose("mmx")
