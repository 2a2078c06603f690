"""Weights of small integers in words of 32 bits, of which the inputs of a group share a scale and a zero point."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm_protocol.checkpoints.formats.packed import require_finite
from swarm_protocol.errors import CheckpointError

WORD_BITS = 32
_TILE = 256  # rows that are unpacked at a time


def unpack_groups(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | int,
    name: str,
    group_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(q - zero) * scale``.

    q: [out, in] of a byte each, scale and zero: [out, groups] -> [out, in] fp32. group_of: [in], the group of each
    input if they do not follow one another in groups of equal size. Raises CheckpointError if a scale is not finite.
    """
    rows, width = q.shape
    scale = require_finite(scale, name)
    groups = scale.shape[1]
    if group_of is None:
        group_of = torch.arange(width) // (width // groups)
    else:
        group_of = group_of.long()
        if bool(((group_of < 0) | (group_of >= groups)).any()):
            raise CheckpointError(f"the groups of tensor {name} are damaged: expected numbers below {groups}")
    unpacked = torch.empty(rows, width, dtype=torch.float32)
    for start in range(0, rows, _TILE):
        tile = slice(start, start + _TILE)
        zeros = zero if isinstance(zero, int) else zero[tile].float()[:, group_of]
        torch.sub(q[tile].float(), zeros, out=unpacked[tile]).mul_(scale[tile][:, group_of])
    return unpacked


def unpack_words(words: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """words: [..., n] int32 -> [..., n * 32 // bits] uint8, of which the first is in the lowest bits of a word.

    order: the place in a word, counted from its lowest bits, of the first integer, of the second, and so on.
    """
    per_word = WORD_BITS // bits
    unpacked = torch.empty(*words.shape, per_word, dtype=torch.uint8)
    for number, place in enumerate(order or range(per_word)):
        unpacked[..., number] = (words >> (bits * place)) & (1 << bits) - 1
    return unpacked.flatten(-2)
