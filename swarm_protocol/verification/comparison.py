"""Whether two servers have computed the same blocks over the same inputs, whatever kernels and quantisations they use.

Rounding is noise: it differs from element to element, and averages out. A lie is not: what was scaled, or computed with
other weights, differs everywhere in the same way. The bounds are measured by ``benchmarks/verification.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

MIN_POSITIONS = 4  # a router that is near a tie may send one position to another expert
FOUR_BITS = frozenset({"int4", "nf4"})  # beside other quantisations only gross lies are found
_TINY = 1e-20
_SE_OF_MEDIAN = 1.2533  # beside that of the mean, for normal noise: sqrt(pi / 2)
_SIGMAS = 5.0


class Kind(NamedTuple):
    """How a server rounds, as its record says: its quantisation, the dtype that it computes in, and on what."""

    quant: str
    dtype: str
    device: str = "cpu"

    @property
    def is_repeatable(self) -> bool:
        """Whether two that are of this kind differ by the order of their sums at most.

        Kernels of GPUs differ from one to the next, and most compute in 16 bits.
        """
        return self.dtype == "float32" and self.device == "cpu"


@dataclass(frozen=True)
class Bounds:
    """What honest servers do not exceed.

    Attributes:
        error: of the median position.
        outlier: error of a position that counts as an outlier.
        outlier_share: of positions that may be outliers, and one more; 0: none may.
        gain: systematic difference in size, beyond what noise explains.
    """

    error: float
    outlier: float
    outlier_share: float
    gain: float

    @classmethod
    def of(cls, one: Kind, other: Kind, num_blocks: int, routed: bool) -> Bounds:
        """For two kinds of servers over ``num_blocks``.

        ``routed``: blocks choose among experts. Where two are nearly as good, rounding decides, and the outputs of that
        position and of those after it differ.

        Weights in four bits have errors that every position sees, and that add up over many blocks to nearly as much as
        the blocks do. So beside servers of another quantisation only gross lies are found: ``is_wide``.
        """
        if one == other and one.is_repeatable:
            return cls(error=0.004, outlier=0.05, outlier_share=0.02 if routed else 0.0, gain=0.002)
        if one.quant != other.quant and FOUR_BITS & {one.quant, other.quant}:
            error = min(0.95, 0.6 * 1.15 ** (num_blocks - 1)) * (1.2 if routed else 1.0)
            return cls(error=error, outlier=1.5, outlier_share=0.5, gain=0.06)
        error = min(0.5, 0.06 * 1.6 ** (num_blocks - 1))
        return cls(error=error, outlier=0.6, outlier_share=0.5 if routed else 0.0, gain=0.004)

    @property
    def is_wide(self) -> bool:
        """Whether answers may be wrong by so much that only gross lies are found, as zeros, or inputs sent back."""
        return self.gain > 0.01


@dataclass(frozen=True)
class Comparison:
    """How much two outputs differ, beside how much the blocks change their inputs.

    Attributes:
        errors: [positions], relative.
        gain: by which one is larger than the other at the median position; ``noise``: its standard error.
    """

    errors: torch.Tensor
    gain: float
    noise: float

    @classmethod
    def of(cls, inputs: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> Comparison:
        """inputs, ours, theirs: [positions, hidden_size], what entered the blocks and the two outputs."""
        x, a, b = (tensor.detach().double() for tensor in (inputs, ours, theirs))
        scale = torch.maximum((a - x).norm(dim=-1), (b - x).norm(dim=-1)).clamp(min=_TINY)
        difference = a - b
        gain, noise = max(
            (_gain(difference, b), _gain(difference, b - x)), key=lambda found: abs(found[0]) - _SIGMAS * found[1]
        )
        return cls((difference.norm(dim=-1) / scale).float(), gain, noise)

    @property
    def error(self) -> float:
        """Of the median position."""
        return float(self.errors.median())

    def excess(self, bounds: Bounds) -> float:
        """How many times what honest servers may differ by; they differ by less than 1."""
        most = 1 + int(bounds.outlier_share * len(self.errors)) if bounds.outlier_share else 0
        outliers = self.errors.sort(descending=True).values
        rare = float(outliers[most]) if most < len(outliers) else 0.0
        # Noise in one of the two makes it larger by half its square.
        gain = (abs(self.gain) - _SIGMAS * self.noise) / (bounds.gain + 0.6 * self.error**2)
        return max(self.error / bounds.error, rare / bounds.outlier, gain)


def _gain(difference: torch.Tensor, base: torch.Tensor) -> tuple[float, float]:
    """The coefficient of the regression of one on the other, position by position: their median, its standard error."""
    num_positions, hidden_size = base.shape
    size = base.norm(dim=-1).clamp(min=_TINY)
    coefficients = (difference * base).sum(-1) / size.square()
    median = coefficients.median()
    deviation = (coefficients - median).abs().median() * 1.4826  # of normal noise: 1 / 0.6745
    # A few positions may happen to lie close together: it is at least what elements that are independent would give.
    least = (difference.norm(dim=-1) / size).median() / hidden_size**0.5
    noise = torch.maximum(deviation, least) * _SE_OF_MEDIAN / num_positions**0.5
    return float(median), float(noise)
