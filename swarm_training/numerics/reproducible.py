"""Sums, norms and orthogonalisation that give the same bits with any number of threads, vector width or device.

Floating-point addition is not associative, so torch's reductions differ in the last bits between machines, and peers
that must stay bit-identical cannot use them. Here every term is rounded to a multiple of one power of two. The sum is
then a sum of integers, which is exact in any order. Elementwise additions, products, divisions and square roots need
no such care, because IEEE 754 rounds each of them correctly. Fused kernels such as ``addcmul`` and ``lerp`` do not
promise correct rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_SUM_BITS = 62  # a sum stays below 2^62, so that an int64 holds it
_CHUNK = 1 << 20  # elements converted to float64 at a time
_MOST_SHIFT = 1000  # of a scale that is a power of two: a float64 has no more than 2^1023
_LARGEST = 2.0**400  # of elements, so that no sum of squares overflows
_VANISHED = 1e-6  # a rest of a column that is smaller, relative to the column, is only rounding


def power(base: float, exponent: int) -> float:
    """Return base ** exponent by multiplications alone: the C library's ``pow`` differs between machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


def dot(a: Tensor, b: Tensor) -> float:
    """Return the dot product of two flat float64 vectors; NaN or infinite if a product is."""
    products = a * b
    if not products.numel():
        return 0.0
    largest = float(products.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return _fixed_point_sum([products], largest, products.numel())


def norm(x: Tensor) -> float:
    """Return the Euclidean norm of a tensor; NaN or infinite as ``squared_norm``."""
    return math.sqrt(squared_norm(x))


def squared_norm(x: Tensor) -> float:
    """Return the sum of the squares of a tensor's elements; NaN if one is, infinite if one is larger than 2^400."""
    flat = x.detach().reshape(-1)
    if not flat.numel():
        return 0.0
    low, high = torch.aminmax(flat)
    largest = max(abs(float(low)), abs(float(high)))
    if math.isnan(float(low)) or largest * largest == 0 or largest > _LARGEST:
        return math.nan if math.isnan(float(low)) else 0.0 if largest <= _LARGEST else math.inf
    squares = (part.double().square() for part in flat.split(_CHUNK))  # exact in 32 bits: 24 bits times 24 bits
    return _fixed_point_sum(squares, largest * largest, flat.numel())


def exact_sum(values: Iterable[float]) -> tuple[float, ...]:
    """Return the sum of numbers without rounding, as a few floats, the largest first; (inf,) if a number is not finite.

    Numbers may be added up in parts, whatever the parts: ``math.fsum`` of the parts' results is the same. (Shewchuk:
    Adaptive Precision Floating-Point Arithmetic, 1997, calls such floats an expansion.)
    """
    terms, parts = list(values), list[float]()
    if not all(map(math.isfinite, terms)):
        return (math.inf,)
    while rest := math.fsum(terms):
        parts.append(rest)
        terms.append(-rest)
    return tuple(parts) or (0.0,)


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormalise columns [n, r] by Gram–Schmidt in float64; a column that depends on earlier ones becomes 0."""
    columns: list[Tensor] = []
    for column in matrix.double().unbind(1):
        length = math.sqrt(dot(column, column))
        for before in columns:
            column = column - before * dot(before, column)
        left = math.sqrt(dot(column, column))
        columns.append(column / left if left > _VANISHED * length else torch.zeros_like(column))
    return torch.stack(columns, 1).to(matrix.dtype)


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.T, [n, m], of [n, r] and [m, r], as the sum of the columns' outer products in their order."""
    product = left[:, :1] * right[:, 0]
    for column in range(1, left.shape[1]):
        product += left[:, column : column + 1] * right[:, column]
    return product


def _fixed_point_sum(chunks: Iterable[Tensor], largest: float, count: int) -> float:
    """Return the sum of float64 terms up to ``largest`` in size; the error is at most count² · largest · 2^-61."""
    shift = min(_SUM_BITS - math.frexp(largest)[1] - math.ceil(math.log2(count)), _MOST_SHIFT)
    scale = math.ldexp(1.0, shift)
    total = sum(int((chunk * scale).round_().to(torch.int64).sum()) for chunk in chunks)
    return total / 2**shift if shift >= 0 else float(total * 2**-shift)
