"""Test of whether two servers computed the same blocks over the same inputs, with any kernels and quantisations.

Rounding is noise: it differs from element to element, and averages out. A lie is systematic: scaled outputs, or outputs
of other weights, differ everywhere in the same way. ``benchmarks/verification.py`` measures the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from swarm_protocol.dht.records import KV8

MIN_POSITIONS = 4  # a router near a tie may send one position to another expert
COARSE = frozenset({"int4", "nf4", "fp8"})
FP8 = "fp8"  # rounds inputs of products to four bits, too: tiny differences of two servers grow to that size
_TINY = 1e-20  # in place of a norm of 0
_SE_OF_MEDIAN = 1.2533  # relative to that of the mean, for normal noise: sqrt(pi / 2)
_SIGMAS = 5.0


class RoundingKind(NamedTuple):
    """The rounding behaviour of a server, from its record: its quantisation, its dtype, and its device."""

    quant: str
    dtype: str
    device: str = "cpu"

    @property
    def is_repeatable(self) -> bool:
        """Return whether two servers of this kind differ at most by the order of their sums.

        Kernels of GPUs differ from each other, and most compute in 16 bits. Keys and values in int8 are rounded in
        sessions, and not where a whole text is computed at once.
        """
        return self.dtype == "float32" and self.device == "cpu" and not self.quant.endswith(KV8)

    @property
    def weights(self) -> str:
        """Return the quantisation of the weights."""
        return self.quant.removesuffix(KV8)

    @property
    def is_coarse(self) -> bool:
        """Return whether only gross lies are detectable beside servers with weights of another quantisation."""
        return self.weights in COARSE


@dataclass(frozen=True)
class Bounds:
    """The maximum differences between honest servers.

    Attributes:
        error: the error of the median position.
        outlier: the error from which a position counts as an outlier.
        outlier_share: the share of positions that may be outliers, plus one more position; 0: none may.
        gain: the systematic difference in size, beyond what noise explains.
    """

    error: float
    outlier: float
    outlier_share: float
    gain: float

    @classmethod
    def of(cls, one: RoundingKind, other: RoundingKind, num_blocks: int, routed: bool) -> Bounds:
        """Return the bounds for two kinds of servers over ``num_blocks`` blocks.

        ``routed``: blocks choose among experts. If two experts score nearly the same, rounding decides, and the outputs
        of that position and of later positions differ.

        Errors of four bits, of weights or of numbers in FP8, affect every position, and add up over many blocks to
        nearly the size of the blocks' own effect. Against servers of another quantisation, only gross lies are
        detectable then: ``is_wide``. The same holds for two servers in FP8.
        """
        if one == other and one.is_repeatable:
            return cls(error=0.004, outlier=0.05, outlier_share=0.02 if routed else 0.0, gain=0.002)
        alike = one.weights == other.weights != FP8
        if not alike and (one.is_coarse or other.is_coarse):
            error = min(0.95, 0.6 * 1.15 ** (num_blocks - 1)) * (1.2 if routed else 1.0)
            return cls(error=error, outlier=1.5, outlier_share=0.5, gain=0.06)
        error = min(0.5, 0.06 * 1.6 ** (num_blocks - 1))
        return cls(error=error, outlier=0.6, outlier_share=0.5 if routed else 0.0, gain=0.004)

    @property
    def is_wide(self) -> bool:
        """Return whether only gross lies are detectable, such as zeros, or inputs sent back."""
        return self.gain > 0.01


@dataclass(frozen=True)
class Comparison:
    """The differences of two outputs, relative to how much the blocks change their inputs.

    Attributes:
        errors: [positions], relative.
        gain: how much larger one is than the other at the median position, relative; ``noise``: its standard error.
    """

    errors: torch.Tensor
    gain: float
    noise: float

    @classmethod
    def of(cls, inputs: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> Comparison:
        """Compare two outputs; inputs (what entered the blocks), ours, theirs: [positions, hidden_size]."""
        x, a, b = (tensor.detach().double() for tensor in (inputs, ours, theirs))
        # Blocks add to their inputs. Relative to the change, inputs that are sent back are as wrong as zeros.
        scale = torch.maximum((a - x).norm(dim=-1), (b - x).norm(dim=-1)).clamp(min=_TINY)
        difference = a - b
        # A liar may scale the outputs, or only what the blocks add: take the gain that noise explains least.
        gain, noise = max(
            (_gain(difference, b), _gain(difference, b - x)), key=lambda found: abs(found[0]) - _SIGMAS * found[1]
        )
        return cls((difference.norm(dim=-1) / scale).float(), gain, noise)

    @property
    def error(self) -> float:
        """Return the error of the median position."""
        return float(self.errors.median())

    def excess(self, bounds: Bounds) -> float:
        """Return the difference as a multiple of what honest servers may have; below 1 for honest servers."""
        most = 1 + int(bounds.outlier_share * len(self.errors)) if bounds.outlier_share else 0
        outliers = self.errors.sort(descending=True).values
        rare = float(outliers[most]) if most < len(outliers) else 0.0
        # Noise in one of the outputs makes it larger by half the square of the noise; 0.6 leaves a margin.
        gain = (abs(self.gain) - _SIGMAS * self.noise) / (bounds.gain + 0.6 * self.error**2)
        return max(self.error / bounds.error, rare / bounds.outlier, gain)


def _gain(difference: torch.Tensor, base: torch.Tensor) -> tuple[float, float]:
    """Regress ``difference`` on ``base``, both [positions, hidden_size], at each position.

    Returns the median of the coefficients, and its standard error.
    """
    num_positions, hidden_size = base.shape
    size = base.norm(dim=-1).clamp(min=_TINY)
    coefficients = (difference * base).sum(-1) / size.square()
    median = coefficients.median()
    deviation = (coefficients - median).abs().median() * 1.4826  # for normal noise: 1 / 0.6745
    # A few positions may lie close together by chance: use at least the value for independent elements.
    least = (difference.norm(dim=-1) / size).median() / hidden_size**0.5
    noise = torch.maximum(deviation, least) * _SE_OF_MEDIAN / num_positions**0.5
    return float(median), float(noise)
