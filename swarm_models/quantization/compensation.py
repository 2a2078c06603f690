"""Rounding to 4 bits in which later inputs of a row compensate for the errors of earlier ones.

The method is GPTQ (Frantar et al., 2023, https://arxiv.org/abs/2210.17323), with scales and zero points that are chosen
when their group is reached. The result has the form of ``quantize_groups``.
"""

from __future__ import annotations

from typing import Self

import torch

from swarm_models.kernels.int4_linear import GROUP, LEVELS, groups_of, scales_and_zeros
from swarm_models.kernels.int8_linear import TINY

PART = 4096  # inputs whose errors are compensated together: the moments of wider layers are diagonal blocks
DAMPING = 0.01  # added to the diagonal of the moments, as a fraction of its mean
_SHRUNK = (1.06, 1.0, 0.95, 0.9, 0.85, 0.8)  # fractions of the range that scales are tried for


class InputMoments:
    """The sums of products of a linear layer's inputs, ``x.T @ x``, over the tokens of a text.

    Attributes:
        parts: diagonal blocks, [part, part] fp32 with parts of at most ``PART`` inputs, in the order of the inputs.
    """

    def __init__(self, width: int) -> None:
        self.parts = [torch.zeros(size, size) for size in _part_sizes(width)]

    @classmethod
    def of(cls, x: torch.Tensor) -> Self:
        """Return the moments of the inputs of some tokens. x: [..., in]."""
        moments = cls(x.shape[-1])
        moments.add(x)
        return moments

    def add(self, x: torch.Tensor) -> None:
        """Add the inputs of some tokens. x: [..., in]."""
        rows = x.flatten(0, -2).float()
        for part, some in zip(self.parts, rows.split(PART, -1), strict=True):
            part.addmm_(some.T, some)


def quantize_compensated(weight: torch.Tensor, moments: InputMoments) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to asymmetric int4 in groups of 32 inputs, such that the outputs for the measured inputs change least.

    weight: [out, in] with ``in`` a multiple of 32 -> q: [out, in] uint8 from 0 to 15, groups: [out, groups] int16, as
    ``quantize_groups`` returns them.
    """
    parts = [
        _compensated(part.double(), _damped(among))
        for part, among in zip(weight.split(_part_sizes(weight.shape[1]), 1), moments.parts, strict=True)
    ]
    return torch.cat([q for q, _ in parts], 1), torch.cat([groups for _, groups in parts], 1)


def _part_sizes(width: int) -> list[int]:
    return [min(PART, width - start) for start in range(0, width, PART)]


def _compensated(weight: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round group after group; the errors of each are spread over the groups that follow. Both are fp64."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    # Upper triangular: row i says how the error of input i is spread over later inputs (the paper's Cholesky form).
    factor = torch.linalg.cholesky(inverse, upper=True)
    left, rounded = weight.clone(), []
    for start in range(0, weight.shape[1], GROUP):
        stop = start + GROUP
        q, groups, errors = _round_group(left[:, start:stop], factor[start:stop, start:stop])
        left[:, stop:] -= errors @ factor[start:stop, stop:]
        rounded.append((q, groups))
    return torch.cat([q for q, _ in rounded], 1), torch.stack([groups for _, groups in rounded], 1)


def _round_group(values: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round the inputs of a group one after the other; each error is spread over the inputs that follow.

    values: [out, 32], changed in place; factor: [32, 32], upper triangular -> q: [out, 32] uint8, groups: [out] int16,
    errors: [out, 32], each divided by its place on the diagonal.
    """
    # An error costs its square, divided by the squared diagonal: what later inputs cannot compensate.
    scale, zero = fitted_groups(values, factor.diagonal() ** -2)
    q, errors = torch.empty(values.shape, dtype=torch.uint8), torch.empty_like(values)
    for i in range(GROUP):
        levels = _levels(values[:, i], scale, zero)
        errors[:, i] = (values[:, i] - (levels - zero) * scale) / factor[i, i]
        values[:, i + 1 :] -= errors[:, i, None] * factor[i, i + 1 :]
        q[:, i] = levels
    return q, groups_of(scale, zero), errors


def fitted_groups(values: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best scale and zero point among some, both [...], for each group.

    values: [..., 32]; importance: [32] or [..., 32], the cost of a squared error. Scales are such that ``groups_of``
    keeps them as they are.
    """
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for fraction in _SHRUNK:
        scale = _kept((high - low) * (fraction / LEVELS))
        middle = (LEVELS - (low + high) / scale) / 2
        for zero in (middle.floor(), middle.ceil()):
            zero = zero.clamp(0, LEVELS)
            found = (_levels(values, scale[..., None], zero[..., None]) - zero[..., None]) * scale[..., None]
            error = ((found - values) ** 2 * importance).sum(-1)
            better = error < best
            best, best_scale, best_zero = (
                torch.where(better, new, old) for new, old in ((error, best), (scale, best_scale), (zero, best_zero))
            )
    return best_scale, best_zero


def _levels(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((values / scale).round_() + zero).clamp_(0, LEVELS)


def _kept(scale: torch.Tensor) -> torch.Tensor:
    """Return the scales, above 0, as ``groups_of`` keeps them."""
    return scales_and_zeros(groups_of(scale, torch.zeros_like(scale)))[0].to(scale.dtype)


def _damped(moments: torch.Tensor) -> torch.Tensor:
    """Return the moments in fp64 with a larger diagonal, so that they can be inverted."""
    damped = moments.double()
    mean = damped.diagonal().mean().clamp(min=TINY)
    damped.diagonal().add_(DAMPING * mean)
    return damped
