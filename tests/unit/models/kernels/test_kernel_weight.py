"""The C++ kernel, on every instruction set of this processor, against its formula in exact integers."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from swarm_models.kernels.int8_linear import Int8Linear
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.library import kernel
from tests.unit.models.kernels.threads import on

pytestmark = pytest.mark.skipif(kernel() is None, reason="the kernel was not compiled")
NAMES = [] if (library := kernel()) is None else library.names
SHAPES = [(96, 64), (100, 1000), (37, 61), (5, 513), (3, 1), (1, 3), (64, 4), (65, 5), (700, 1025)]  # [out, in]
ROWS = (0, 1, 2, 3, 4, 5, 7, 16, 300)


@pytest.fixture(params=NAMES)
def isa(request) -> Iterator[str]:
    chosen = kernel()
    assert chosen is not None
    before = chosen.name
    chosen.choose(request.param)
    yield request.param
    chosen.choose(before)


@pytest.fixture(params=[1, 2])
def threads(request) -> int:
    return request.param


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


def inputs(rows: int, width: int) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    if rows > 2:
        x[1] = 0
        x[2, 0] = 6000
    return x


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_spoils_no_other(isa, bad):
    q, scale = weight_of(100, 70)
    weight = KernelWeight(q, scale)
    x = inputs(7, 70)
    alone = weight.matmul(x)
    x[4, 69] = bad
    y = weight.matmul(x)
    others = [0, 1, 2, 3, 5, 6]
    assert y[4].isnan().all()
    assert torch.equal(y[others], alone[others])


def test_weights_that_share_an_input_give_what_each_gives(isa, threads):
    shapes = [(2048, 512), (65, 512), (3, 512), (1000, 512)]
    weights = [KernelWeight(*weight_of(*shape, seed)) for seed, shape in enumerate(shapes)]
    for rows in (1, 3, 300):
        x = inputs(rows, 512)
        with on(threads):
            shared = KernelWeight.matmul_shared(x, weights)
        for weight, together in zip(weights, shared, strict=True):
            assert torch.equal(together, weight.matmul(x))


def test_tiny_and_huge_numbers_are_finite(isa):
    q, scale = weight_of(8, 8)
    weight = KernelWeight(q, scale)
    for factor in (1e-45, 1e-38, 1e30):
        y = weight.matmul(inputs(1, 8).abs().clamp(min=1) * factor)
        assert not y.isnan().any()


def test_an_unknown_instruction_set_is_refused():
    chosen = kernel()
    assert chosen is not None
    with pytest.raises(ValueError, match=r"choose one of .*generic"):
        chosen.choose("mmx")


def test_linears_differentiate_through_it():
    linear = Int8Linear.from_float(torch.randn(30, 20), implementation=KernelWeight)
    x = torch.randn(4, 20, requires_grad=True)
    linear(x).square().sum().backward()
    expected = 2 * (x.detach() @ linear.weight.T) @ linear.weight
    assert x.grad is not None
    assert (x.grad - expected).norm() < 1e-3 * expected.norm()  # 14 bits of activations and gradients
