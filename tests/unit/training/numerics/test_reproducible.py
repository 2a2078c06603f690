"""Sums, norms and bases that have the same bits in any order and for any number of threads."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from swarm_training.numerics.reproducible import dot, exact_sum, norm, orthonormal, outer_sum, power, squared_norm


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e30])
def test_the_norm_is_that_of_exact_arithmetic(scale: float) -> None:
    x = random(5000) * scale
    exact = math.sqrt(sum(Fraction(value) ** 2 for value in x.tolist()))
    assert norm(x) == pytest.approx(exact, rel=1e-12)


def test_the_order_of_elements_does_not_matter() -> None:
    x = random(100_003) * torch.logspace(-6, 6, 100_003)
    for seed in range(3):
        shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]
        assert norm(shuffled) == norm(x)
        assert dot(shuffled.double(), shuffled.double()) == dot(x.double(), x.double())
    in_other_orders = {float(torch.stack([part.sum() for part in x.split(size)]).sum()) for size in (7, 1000, 50_000)}
    assert len(in_other_orders) > 1, "torch's own sums differ: that is what this is for"


def test_norms_of_more_than_a_chunk_and_of_other_dtypes() -> None:
    x = random(3_000_001)
    assert norm(x) == pytest.approx(float(x.double().norm()), rel=1e-12)
    assert norm(x.bfloat16()) == pytest.approx(float(x.bfloat16().double().norm()), rel=1e-12)


def test_norms_of_nothing_zeros_and_what_is_not_finite() -> None:
    assert norm(torch.empty(0)) == norm(torch.zeros(5)) == 0
    assert math.isinf(norm(torch.tensor([1.0, -math.inf])))
    assert math.isnan(norm(torch.tensor([1.0, math.nan, math.inf])))
    assert math.isnan(dot(torch.tensor([math.nan]).double(), torch.ones(1).double()))
    assert dot(torch.empty(0).double(), torch.empty(0).double()) == 0


@pytest.mark.parametrize(("value", "expected"), [(1e-170, 0.0), (1e-155, 3e-310), (1e121, math.inf)])
def test_squares_beyond_the_range_of_a_float64_are_no_error(value: float, expected: float) -> None:
    assert squared_norm(torch.full((3,), value, dtype=torch.float64)) == pytest.approx(expected, rel=1e-6)


def test_a_sum_in_parts_is_that_of_all_whatever_the_parts() -> None:
    terms = (random(1000).double().square() * torch.logspace(-60, 60, 1000, dtype=torch.float64)).tolist()
    exact = sum(map(Fraction, terms))
    assert sum(map(Fraction, exact_sum(terms))) == exact and len(exact_sum(terms)) < 20
    for size in (1, 7, 300):
        parts = [exact_sum(terms[start : start + size]) for start in range(0, 1000, size)]
        assert math.fsum(each for part in parts for each in part) == float(exact)
    assert exact_sum([]) == exact_sum([0.0]) == (0.0,)
    assert exact_sum([1.0, math.nan]) == exact_sum([math.inf, 1.0]) == (math.inf,)


def test_products_of_either_sign_cancel() -> None:
    a, b = random(4000).double(), random(4000, seed=1).double()
    exact = float(sum(Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)))
    assert dot(a, b) == pytest.approx(exact, rel=1e-11)
    assert dot(torch.cat([a, a]), torch.cat([b, -b])) == 0


@pytest.mark.parametrize("exponent", [0, 1, 2, 7, 1000])
def test_powers(exponent: int) -> None:
    assert power(0.999, exponent) == pytest.approx(0.999**exponent, rel=1e-13)


def test_columns_are_orthonormal_and_span_the_same() -> None:
    matrix = random(50, 4)
    basis = orthonormal(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(4))
    torch.testing.assert_close(basis @ (basis.T @ matrix), matrix)
    reference, _ = torch.linalg.qr(matrix)
    torch.testing.assert_close(basis.abs(), reference.abs())


def test_columns_that_depend_on_others_vanish() -> None:
    a, b = random(30, 1), random(30, 1, seed=1)
    basis = orthonormal(torch.cat([a, torch.zeros(30, 1), 3 * a, b], 1))
    assert basis.norm(dim=0).round(decimals=5).tolist() == [1, 0, 0, 1]


def test_threads_change_nothing() -> None:
    x, matrix = random(2_000_000), random(40_000, 4)
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append((norm(x), orthonormal(matrix)))
    finally:
        torch.set_num_threads(threads)
    assert all(length == results[0][0] and torch.equal(basis, results[0][1]) for length, basis in results)


def test_sums_of_outer_products() -> None:
    left, right = random(20, 3), random(30, 3, seed=1)
    torch.testing.assert_close(outer_sum(left, right), left @ right.T)
