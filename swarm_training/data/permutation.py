"""A pseudorandom permutation of 0..size−1 that computes any element by itself, without a table.

A Feistel network permutes the numbers of 2k bits (Luby and Rackoff, 1988). A result outside 0..size−1 is permuted again
until it is inside ("cycle walking", Black and Rogaway, 2002, §3), fewer than 4 times on average.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_ROUNDS = 6
MAX_SIZE = 1 << 62


@dataclass(frozen=True)
class Permutation:
    """A permutation of ``size`` numbers, chosen by ``key``. Integer arithmetic makes it equal on all machines."""

    size: int
    key: bytes

    def __post_init__(self) -> None:
        if not 0 < self.size <= MAX_SIZE:
            raise ValueError(f"a permutation of {self.size} numbers: expected 1 to {MAX_SIZE}")

    def at(self, positions: Indices) -> Indices:
        """Return the elements at these positions, each in 0..size−1; [n] → [n]."""
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.size)
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        keys = np.frombuffer(hashlib.shake_128(self.key).digest(8 * _ROUNDS), dtype="<u8").astype(np.uint64)
        values = _feistel(positions.astype(np.uint64), half_bits, keys)
        while (outside := values >= self.size).any():
            values[outside] = _feistel(values[outside], half_bits, keys)
        return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << shift) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014, Figure 16), modulo 2**64, elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
