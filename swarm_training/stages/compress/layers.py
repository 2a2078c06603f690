"""The layers of a model at the boundary of two stages, through which fewer numbers travel (Ryabinin et al., 2023,
compression-aware architecture).

The first half, ``down``, stands at the end of stage k, and the second half, ``up``, at the beginning of stage k + 1.
Between them, h / f numbers of a token travel forward, and as many gradients backward. Both are trained with the model,
which they change: a checkpoint that was trained without them needs training to get used to them.

    bottleneck:f  down(x) = norm(linear(norm(x))), h -> h / f;  up(y) = linear(y), h / f -> h
    maxout:f      down(x) = norm(max over each f neighbours of norm(x));  up(y) = linear(y)
    none          both are the identity

The norm over h makes the sums in the residual stream alike before they are mixed. The norm over h / f gives what
travels the same scale at every token, which suits coarse codecs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

KINDS = ("bottleneck", "maxout")
NONE = "none"


@dataclass(frozen=True)
class BoundaryCompression:
    """The layers of a boundary by name: ``none``, ``bottleneck:4``, ``maxout:2``. ``factor`` is 1 for ``none``."""

    kind: str
    factor: int

    @classmethod
    def parse(cls, name: str) -> BoundaryCompression:
        """Return the layers of this name, which may be from the file beside a checkpoint. Raises ValueError if there
        are none."""
        kind, _, factor = name.partition(":")
        if name == NONE:
            return cls(NONE, 1)
        if kind not in KINDS or not (factor.isascii() and factor.isdigit()) or int(factor) < 2:
            raise ValueError(
                f"layers {name!r} between stages are unknown: expected {NONE}, or {' or '.join(KINDS)} with the factor "
                "by which fewer numbers travel, at least 2, such as bottleneck:4"
            )
        return cls(kind, int(factor))

    def width(self, hidden_size: int) -> int:
        """Return how many numbers of a token travel. Raises ValueError if the hidden size cannot be divided."""
        if hidden_size % self.factor:
            raise ValueError(
                f"{self} cannot stand between stages of hidden size {hidden_size}: expected a factor that divides it"
            )
        return hidden_size // self.factor

    def __str__(self) -> str:
        return NONE if self.kind == NONE else f"{self.kind}:{self.factor}"


class Maxout(nn.Module):
    """A module that takes the largest of ``factor`` neighbours (Goodfellow et al., 2013): [..., h] -> [..., h /
    factor].

    The gradient goes to the largest number alone; among equal numbers, to the first.
    """

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        largest: Tensor = hidden.unflatten(-1, (-1, self.factor)).max(-1).values
        return largest


def boundary(name: str, hidden_size: int, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Return (down, up): [..., hidden size] -> [..., width], and back, in the dtype of their parameters (float32 at
    first).

    Peers that give the same arguments get the same numbers, so that each makes its half by itself. torch's own random
    numbers are not used. The linear layers keep the variance of their inputs, and have no bias.

    Args:
        seed: the seed of this boundary, which must be different for each boundary of a run.

    Raises:
        ValueError: there are no layers of that name, or their factor does not divide the hidden size.
    """
    compression = BoundaryCompression.parse(name)
    width = compression.width(hidden_size)
    if compression.kind == NONE:
        return nn.Identity(), nn.Identity()
    generator = torch.Generator().manual_seed(seed)
    up = _linear(width, hidden_size, generator)
    narrow = Maxout(compression.factor) if compression.kind == "maxout" else _linear(hidden_size, width, generator)
    return nn.Sequential(nn.LayerNorm(hidden_size), narrow, nn.LayerNorm(width)), up


def _linear(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, bias=False)
    nn.init.normal_(linear.weight, std=1 / sqrt(num_inputs), generator=generator)
    return linear
