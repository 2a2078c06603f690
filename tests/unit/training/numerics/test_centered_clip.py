"""CenteredClip beside its formula, and what attackers can do to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swarm_training.numerics.centered_clip import centered_clip

ONES = torch.ones(10)


def vectors(scale: float, attackers: int = 3, n: int = 500) -> Tensor:
    """Honest ones around a direction, then attackers that point the other way."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(n, generator=generator) / n**0.5
    x = centre + 0.5 * torch.randn(10, n, generator=generator) / n**0.5
    x[10 - attackers :] *= -scale
    return x


def clipped(x: Tensor, weights: Tensor, tau: float) -> Tensor:
    """From the coordinatewise median."""
    return centered_clip(x, weights, tau, x.median(0).values)


def by_the_formula(x: Tensor, w: Tensor, tau: float) -> Tensor:
    """v += Σ w_i min(1, τ/|x_i − v|) (x_i − v) / Σ w, from the mean of the first two, until it stands."""
    x, w = x.double(), w.double()
    v = x[:2].mean(0)
    for number in range(20_000):
        d = x - v
        step = (w * (tau / d.norm(dim=1)).clamp(max=1)) @ d / w.sum()
        v = v + step
        if number % 100 == 0 and float(step.norm()) < 1e-12 * tau:
            break
    return v


@pytest.mark.parametrize("tau", [0.05, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("weights", [ONES, torch.arange(1.0, 11.0)])
def test_it_is_where_the_formula_stops(tau: float, weights: Tensor) -> None:
    x = vectors(5.0)
    v = clipped(x, weights, tau)
    torch.testing.assert_close(v.double(), by_the_formula(x, weights, tau), rtol=0, atol=1e-3 * tau)
    differences = x.double() - v
    shortened = differences * (tau / differences.norm(dim=1, keepdim=True)).clamp(max=1)
    assert float((weights.double() @ shortened).norm()) < 2e-5 * tau * float(weights.sum())


def test_an_infinite_tau_gives_the_weighted_mean() -> None:
    x = vectors(3.0)
    weights = torch.arange(10.0)
    torch.testing.assert_close(clipped(x, weights, math.inf), weights @ x / weights.sum())


def test_what_is_not_finite_or_weighs_nothing_does_not_count() -> None:
    x, start = vectors(3.0), torch.zeros(500)
    x[7, 3], x[8, 3] = math.nan, math.inf
    weights = torch.tensor([1.0] * 9 + [0.0])
    torch.testing.assert_close(centered_clip(x, weights, 0.3, start), centered_clip(x[:7], ONES[:7], 0.3, start))


@pytest.mark.parametrize("scale", [10.0, 1e30])
def test_attackers_move_it_by_a_bounded_distance(scale: float) -> None:
    x = vectors(scale)
    honest = x[:7].mean(0)
    tau = float((x[:7] - honest).norm(dim=1).median())
    assert float((clipped(x, ONES, tau) - honest).norm()) < tau < float((x.mean(0) - honest).norm()) / 3


def test_the_start_does_not_matter() -> None:
    x = vectors(10.0)
    far = centered_clip(x, ONES, 0.5, start=torch.full((500,), 3.0))
    torch.testing.assert_close(far, clipped(x, ONES, 0.5), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "tau"), [(ONES, 0.0), (ONES, math.nan), (torch.zeros(10), 1.0), (torch.tensor([-1.0] + [1.0] * 9), 1.0)]
)
def test_what_makes_no_sense_is_refused(weights: Tensor, tau: float) -> None:
    with pytest.raises(ValueError, match="expect"):
        clipped(vectors(1.0), weights, tau)
