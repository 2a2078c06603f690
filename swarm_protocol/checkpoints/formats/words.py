"""Small integers that are packed into words of 32 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORD_BITS = 32


def unpack_words(words: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """words: [..., n] int32 -> [..., n * 32 // bits] uint8, of which the first is in the lowest bits of a word.

    order: the place in a word, counted from its lowest bits, of the first integer, of the second, and so on.
    """
    per_word = WORD_BITS // bits
    unpacked = torch.empty(*words.shape, per_word, dtype=torch.uint8)
    for number, place in enumerate(order or range(per_word)):
        unpacked[..., number] = (words >> (bits * place)) & (1 << bits) - 1
    return unpacked.flatten(-2)
