"""Sums, norms and orthogonalisation that give the same bits for any number of threads, vector width or device.

Floating-point addition is not associative, so torch's reductions differ in the last bits between machines, and peers
that must stay bit-identical cannot use them. Here every term is rounded to a multiple of one power of two, so that
the sum is one of integers, which is exact in any order. Elementwise additions, products, divisions and square roots
need no such care: IEEE 754 rounds each of them correctly (fused kernels such as ``addcmul`` and ``lerp`` do not
promise that).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_SUM_BITS = 62  # of an int64, with room for the sign
_CHUNK = 1 << 20  # elements that are float64 at a time
_VANISHED = 1e-6  # relative: what is left of a column then is rounding


def power(base: float, exponent: int) -> float:
    """base ** exponent by multiplications alone: the C library's ``pow`` is not the same everywhere."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


def dot(a: Tensor, b: Tensor) -> float:
    """Of two flat float64 vectors; NaN or infinite if a product is."""
    products = a * b
    if not products.numel():
        return 0.0
    largest = float(products.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return _fixed_point_sum([products], largest, products.numel())


def norm(x: Tensor) -> float:
    """The Euclidean norm of a tensor of at most 32 bits per element; NaN or infinite if an element is."""
    flat = x.detach().reshape(-1)
    if not flat.numel():
        return 0.0
    low, high = torch.aminmax(flat)
    largest = max(abs(float(low)), abs(float(high)))
    if math.isnan(float(low)) or largest == 0 or math.isinf(largest):
        return math.nan if math.isnan(float(low)) else largest
    squares = (part.double().square() for part in flat.split(_CHUNK))  # exact: 24 bits times 24 bits
    return math.sqrt(_fixed_point_sum(squares, largest * largest, flat.numel()))


def orthonormal(matrix: Tensor) -> Tensor:
    """Its columns [n, r] by Gram–Schmidt in float64; a column that depends on those before it becomes 0."""
    columns: list[Tensor] = []
    for column in matrix.double().unbind(1):
        length = math.sqrt(dot(column, column))
        for before in columns:
            column = column - before * dot(before, column)
        left = math.sqrt(dot(column, column))
        columns.append(column / left if left > _VANISHED * length else torch.zeros_like(column))
    return torch.stack(columns, 1).to(matrix.dtype)


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T of [n, r] and [m, r]: the columns' outer products, added in their order."""
    product = left[:, :1] * right[:, 0]
    for column in range(1, left.shape[1]):
        product += left[:, column : column + 1] * right[:, column]
    return product


def _fixed_point_sum(chunks: Iterable[Tensor], largest: float, count: int) -> float:
    """Of float64 terms, none of which is larger in size; errs by at most count units of 2^-61 of count · largest."""
    shift = _SUM_BITS - math.frexp(largest)[1] - math.ceil(math.log2(count))
    scale = math.ldexp(1.0, shift)
    total = sum(int((chunk * scale).round_().to(torch.int64).sum()) for chunk in chunks)
    return total / 2**shift if shift >= 0 else float(total * 2**-shift)
