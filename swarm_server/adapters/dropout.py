"""Dropout that is the same wherever and however often it is computed: in forward, backward, and after retries."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

_LEVELS = 1 << 16  # levels of probability; each 64-bit number of the generator decides four elements


@dataclass(frozen=True)
class Dropout:
    """The dropout of one request.

    The seed, the place in the model and the row's number in the request decide which elements of a row are dropped. The
    choice does not depend on which rows are computed together.

    Attributes:
        first_row: the number, in the request, of the first row that is computed now.
    """

    seed: int
    first_row: int = 0

    def factors(self, block: int, module: str, probability: float, x: torch.Tensor) -> torch.Tensor:
        """Return factors for x, [rows, tokens, in_features]: 0 for dropped elements, else 1 / (1 - probability)."""
        num_rows, num_tokens, width = x.shape
        kept = np.empty((num_rows, num_tokens * width), dtype=bool)
        threshold = round(probability * _LEVELS)
        for row in range(num_rows):
            digest = hashlib.sha256(f"{self.seed} {block} {module} {self.first_row + row}".encode()).digest()
            numbers = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(-(-kept.shape[1] // 4))
            kept[row] = numbers.astype("<u8", copy=False).view("<u2")[: kept.shape[1]] >= threshold
        factors = torch.from_numpy(kept).view(num_rows, num_tokens, width).to(x.device, x.dtype)
        return factors.mul_(1 / (1 - probability))
