"""Sketches of gradients: 256 numbers that distinguish one gradient from another.

Element i is added, with a random sign, to number i mod 256 (a count sketch: Charikar et al., 2002). On average, the
squared norm of a sketch is that of the gradient. Sketches are linear: the distance of two sketches is that of the
gradients, give or take a tenth. Without the seed, another gradient with the same sketch cannot be made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

BUCKETS = 256
SEED_BYTES = 16
_CHUNK = 1 << 20  # elements that are converted to float64 at a time; a multiple of BUCKETS


def sketch(gradients: Iterable[Tensor], seed: bytes) -> tuple[float, ...]:
    """Return the sketch, [256] float64, of tensors of any shape, each beginning at number 0. ``seed``: 16 bytes.

    NumPy promises that Philox (Salmon et al., 2011) gives the same bits everywhere.
    """
    assert len(seed) == SEED_BYTES
    bits = np.random.Philox(key=int.from_bytes(seed, "little"))
    found = np.zeros(BUCKETS)
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].to("cpu", torch.float64).numpy()
            found += np.pad(part * _signs(bits, len(part)), (0, -len(part) % BUCKETS)).reshape(-1, BUCKETS).sum(0)
    return tuple(found.tolist())


def _signs(bits: np.random.Philox, count: int) -> np.ndarray:
    """Return signs, [count] of −1 and 1."""
    raw = bits.random_raw(-(-count // 64)).astype("<u8").view(np.uint8)
    return 1.0 - 2.0 * np.unpackbits(raw, count=count)


def relative_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return ‖one − other‖ / max(‖one‖, ‖other‖): 0 if both vanish, infinity if their lengths differ."""
    if len(one) != len(other):
        return math.inf
    largest = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / largest if largest else 0.0


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Return the same measure of two tensors of any shape: infinity if their shapes differ."""
    if one.shape != other.shape:
        return math.inf
    first, second = one.double(), other.double()
    largest = max(float(first.norm()), float(second.norm()))
    return float((first - second).norm()) / largest if largest else 0.0
