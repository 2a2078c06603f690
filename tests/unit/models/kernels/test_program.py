"""Instructions compute what torch computes in float64, on tensors of any strides; and rows do not see each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from swarm_models.kernels.int8_linear import quantize_rows
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.program import NOTHING, Instruction, Opcode, Operand, Program

pytestmark = pytest.mark.skipif(not Program.is_available(), reason="no compiled kernel")

NO_PLACES = np.zeros((1, 4), dtype=np.int64)
SIZES = [(1, 1, 1, 1), (2, 3, 1, 17), (1, 1, 5, 64), (3, 1, 2, 127)]
UNARY: dict[Opcode, Callable[[torch.Tensor], torch.Tensor]] = {
    Opcode.COPY: lambda x: x,
    Opcode.NEG: lambda x: -x,
    Opcode.SILU: functional.silu,
    Opcode.SIGMOID: torch.sigmoid,
    Opcode.TANH: torch.tanh,
    Opcode.RELU: torch.relu,
    Opcode.GELU: functional.gelu,
    Opcode.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Opcode.COS: torch.cos,
    Opcode.SIN: torch.sin,
    Opcode.SQUARE: lambda x: x**2,
    Opcode.CUBE: lambda x: x**3,
}
BINARY: dict[Opcode, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Opcode.ADD: torch.add,
    Opcode.SUB: torch.sub,
    Opcode.MUL: torch.mul,
    Opcode.DIV: torch.div,
}


def operand(tensor: torch.Tensor, sizes: tuple[int, ...]) -> Operand:
    return Operand(tensor.data_ptr(), tuple(tensor.expand(sizes).stride()))


def run(kind: Opcode, sizes: tuple[int, ...], out: torch.Tensor, *inputs: torch.Tensor, scalar: float = 0.0) -> None:
    operands = [operand(out, sizes), *(operand(tensor, sizes) for tensor in inputs)]
    operands += [NOTHING] * (4 - len(operands))
    assert Program([Instruction(kind, sizes, tuple(operands), scalar)]).run(NO_PLACES)


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", UNARY)
def test_functions_of_one_tensor(kind: Opcode, sizes: tuple[int, ...]) -> None:
    x, out = numbers(*sizes), torch.zeros(sizes)
    run(kind, sizes, out, x)
    torch.testing.assert_close(out.double(), UNARY[kind](x.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Opcode.NEG, Opcode.SILU])
def test_strides_of_all_kinds(kind: Opcode) -> None:
    wide = numbers(6, 4, 3, 10)
    for x in (wide.permute(2, 0, 1, 3), wide[..., ::2], wide[:, :, :, :1].expand(6, 4, 3, 7), wide.transpose(2, 3)):
        sizes = tuple(x.shape)
        out = torch.zeros(sizes[0], sizes[2], sizes[1], sizes[3]).transpose(1, 2)
        run(kind, sizes, out, x)
        torch.testing.assert_close(out.double(), UNARY[kind](x.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Opcode.SILU, Opcode.SIGMOID, Opcode.GELU_TANH, Opcode.GELU])
def test_large_numbers_stay_finite_and_nan_stays(kind: Opcode) -> None:
    x = torch.tensor([-1e30, -200.0, -88.5, 0.0, 88.5, 200.0, 1e10, math.nan]).view(1, 1, 1, -1)
    out = torch.zeros_like(x)
    run(kind, tuple(x.shape), out, x)
    torch.testing.assert_close(out, UNARY[kind](x), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", BINARY)
def test_functions_of_two_tensors(kind: Opcode, sizes: tuple[int, ...]) -> None:
    x, y = numbers(*sizes), numbers(*sizes, seed=1)
    others = [y, y[..., :1], y[:1, :1, :1], torch.full((1, 1, 1, 1), 2.5)]
    for a, b in [*((x, other) for other in others), *((other, x) for other in others)]:
        out = torch.zeros(sizes)
        run(kind, sizes, out, a, b)
        assert torch.equal(out, BINARY[kind](a, b))  # one rounding each: no bit may differ


def test_in_place() -> None:
    x, y = numbers(2, 3, 4, 33), numbers(2, 3, 4, 33, seed=1)
    expected = x + y
    run(Opcode.ADD, tuple(x.shape), x, x, y)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("size", [1, 15, 16, 64, 1000])
def test_means_and_layer_norms(size: int) -> None:
    x = numbers(2, 1, 3, size)
    out = torch.zeros(2, 1, 3, 1)
    run(Opcode.MEAN, tuple(x.shape), out.expand_as(x), x)
    torch.testing.assert_close(out.double(), x.double().mean(-1, keepdim=True), rtol=1e-6, atol=1e-6)
    weight, bias, out = numbers(size, seed=1), numbers(size, seed=2), torch.zeros_like(x)
    for given in ((weight, bias), (weight, None), (None, None)):
        operands = [NOTHING if tensor is None else Operand(tensor.data_ptr()) for tensor in given]
        sizes = tuple(x.shape)
        instruction = Instruction(
            Opcode.LAYER_NORM, sizes, (operand(out, sizes), operand(x, sizes), *operands), scalar=1e-5
        )
        assert Program([instruction]).run(NO_PLACES)
        doubles = [None if tensor is None else tensor.double() for tensor in given]
        expected = functional.layer_norm(x.double(), (size,), *doubles, 1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_square_roots_and_integers() -> None:
    x, out = numbers(1, 1, 2, 50).abs() + 0.1, torch.zeros(1, 1, 2, 50)
    run(Opcode.RSQRT, tuple(x.shape), out, x)
    torch.testing.assert_close(out.double(), x.double().rsqrt(), rtol=1e-6, atol=0)
    integers = torch.arange(100).view(1, 1, 2, 50) * 1000
    run(Opcode.FROM_INT64, tuple(x.shape), out, integers)
    assert torch.equal(out, integers.float())


def test_products_are_those_of_the_weight() -> None:
    weight = KernelWeight(*quantize_rows(numbers(130, 70)))
    x, out = numbers(5, 70, seed=1), torch.zeros(5, 130)
    packed, scale = weight.address
    operands = Operand(out.data_ptr()), Operand(x.data_ptr()), Operand(packed), Operand(scale)
    assert Program([Instruction(Opcode.PRODUCT, (5, 70, 130, 0), operands)]).run(NO_PLACES)
    assert torch.equal(out, weight.matmul(x))


@pytest.mark.parametrize(("width", "num_columns"), [(130, 16), (16, 193), (1, 1), (3, 80)])
def test_products_of_matrices(width: int, num_columns: int) -> None:
    x, matrix = numbers(5, width + 2)[:, :width], numbers(width, num_columns, seed=1)

    def times_matrix(rows: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(rows), num_columns)
        operands = [Operand(tensor.data_ptr(), (*tensor.stride(), 0, 0)) for tensor in (out, rows, matrix)]
        sizes = len(rows), width, num_columns, 0
        assert Program([Instruction(Opcode.MATRIX_PRODUCT, sizes, (*operands, NOTHING))]).run(NO_PLACES)
        return out

    together = times_matrix(x)
    torch.testing.assert_close(together.double(), x.double() @ matrix.double(), rtol=1e-5, atol=1e-4)
    assert torch.equal(torch.cat([times_matrix(row) for row in x.split(1)]), together)


@pytest.mark.parametrize("kind", [Opcode.SILU, Opcode.MEAN, Opcode.LAYER_NORM, Opcode.MUL])
def test_no_bit_of_a_row_depends_on_the_others(kind: Opcode) -> None:
    x, y = numbers(1, 1, 7, 301), numbers(301, seed=1).view(1, 1, 1, -1)

    def of(rows: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(rows.shape if kind != Opcode.MEAN else (1, 1, rows.shape[2], 1))
        more = {Opcode.MUL: (y,), Opcode.LAYER_NORM: (y, y)}.get(kind, ())
        run(kind, tuple(rows.shape), out.expand(rows.shape), rows, *more, scalar=1e-5)
        return out

    together = of(x)
    for row in range(7):
        assert torch.equal(together[:, :, row], of(x[:, :, row : row + 1])[:, :, 0])
