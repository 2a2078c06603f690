"""Weights of small integers packed in 32-bit words; the inputs of a group share a scale and a zero point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from swarm_models.checkpoints.formats.packed import PackedTensor, require_finite
from swarm_models.checkpoints.safetensors_file import filled
from swarm_protocol.errors import CheckpointError

WORD_BITS = 32
_TILE = 256  # how many rows are unpacked at a time


@dataclass(frozen=True)
class Integers:
    """A weight of small integers, which stands for ``(q - zero) * scale``.

    Attributes:
        q: [out, in] int8, uint8 or float8.
        scale: [out, groups] or [1, 1], any float dtype.
        zero: [out, groups] or one number.
        group_of: [in], the group of each input; None if groups are consecutive and of equal size.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | int
    group_of: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class IntegerTensor(PackedTensor):
    """A weight stored as integers: ``unpack`` returns ``Integers``. ``tiles`` reads all of them into memory first."""

    has_tiles = True

    def read_integers(self) -> Integers:
        """Return the stored integers, with scales in fp32; raise CheckpointError if a scale is not finite."""
        integers: Integers = self._unpacked()
        (_, width), (_, groups) = integers.q.shape, integers.scale.shape
        group_of = integers.group_of
        if group_of is not None and torch.equal(group_of.long(), _in_order(width, groups)):
            group_of = None
        return replace(integers, scale=require_finite(integers.scale, self.name), group_of=group_of)

    def read(self) -> torch.Tensor:
        return filled(self.shape, self.dtype, self.tiles(_TILE))

    def tiles(self, min_rows: int) -> Iterator[torch.Tensor]:
        return _dequantize(self.read_integers(), self.name, min_rows)


def _in_order(width: int, groups: int) -> torch.Tensor:
    """Return the group of each input for consecutive groups; the last group may be longer."""
    return (torch.arange(width) // max(width // groups, 1)).clamp_(max=groups - 1)


def _dequantize(integers: Integers, name: str, tile_rows: int) -> Iterator[torch.Tensor]:
    """Yield tiles of [out, in] fp32; raise CheckpointError if an input belongs to a group that does not exist."""
    q, group_of = integers.q, integers.group_of
    rows, width = q.shape
    scale = integers.scale.expand(rows, -1)
    zero = integers.zero if isinstance(integers.zero, int) else integers.zero.expand(rows, -1)
    groups = scale.shape[1]
    if group_of is None:
        group_of = _in_order(width, groups)
    else:
        group_of = group_of.long()
        if bool(((group_of < 0) | (group_of >= groups)).any()):
            raise CheckpointError(f"the groups of tensor {name} are damaged: expected numbers below {groups}")
    for start in range(0, rows, tile_rows):
        tile = slice(start, start + tile_rows)
        zeros = zero if isinstance(zero, int) else zero[tile].float()[:, group_of]
        yield q[tile].float().sub_(zeros).mul_(scale[tile][:, group_of])


def unpack_words(words: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Unpack words [..., n] int32 -> [..., n * 32 // bits] uint8; the first integer is in the lowest bits by default.

    order: the place of the first, second, … integer in a word, counted from the lowest bits.
    """
    per_word = WORD_BITS // bits
    unpacked = torch.empty(*words.shape, per_word, dtype=torch.uint8)
    for number, place in enumerate(order or range(per_word)):
        unpacked[..., number] = (words >> (bits * place)) & (1 << bits) - 1
    return unpacked.flatten(-2)


def pack_words(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack [..., n] uint8 -> [..., words] int32, as ``unpack_words`` unpacks them; zeros fill the last word."""
    per_word = WORD_BITS // bits
    padded = torch.nn.functional.pad(integers, (0, -integers.shape[-1] % per_word)).long()
    shifts = bits * torch.arange(per_word)
    words = (padded.unflatten(-1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(words < 1 << (WORD_BITS - 1), words, words - (1 << WORD_BITS)).int()
