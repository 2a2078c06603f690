"""The codecs of flat vectors: 8, 4, 2, about 1, about a half or about a third of a byte per element."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm_protocol.codecs.elements import pack_int8, unpack_int8
from swarm_protocol.codecs.sizes import INT8_BLOCK

TWO_BIT = "2bit"
_MAX_FLOAT16 = 65504.0
_BLOCK = 64  # elements of a block of two or four bits each
_MOST_UNITS = 7  # the largest multiple of a unit that four bits hold
_SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)  # of the elements in a byte


class Codec(Protocol):
    """An encoding of vectors of n elements as bytes. Vectors are float64 for ``fp64``, float32 for all other codecs.

    Values that are not finite stay not finite; in ``int8``, ``int4`` and ``2bit``, so does their whole block of 64
    elements. Finite values beyond the range of ``fp16`` are clamped to it, in ``2bit`` too.
    """

    name: str
    dtype: torch.dtype  # of the vectors

    def encode(self, vector: Tensor) -> bytes:
        """Return the bytes of a vector, [n] of ``dtype``."""

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        """Return a vector, [n] of ``dtype``, that owns its memory. Raise ValueError if the size is not that of n."""

    def size_bytes(self, n: int) -> int:
        """Return the number of bytes of n encoded elements."""


class _Float:
    """A codec that stores elements in a floating-point type."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._dtype = dtype

    def encode(self, vector: Tensor) -> bytes:
        flat = _flat(vector, self.dtype)
        return (_half(flat) if self._dtype == torch.float16 else flat).numpy().tobytes()

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        _check_size(self, data, n)
        return (
            torch.frombuffer(bytearray(data), dtype=self._dtype).to(self.dtype)
            if n
            else torch.empty(0, dtype=self.dtype)
        )

    def size_bytes(self, n: int) -> int:
        return n * self._dtype.itemsize


class _Int8:
    """A codec of blocks of 64 int8 elements with the float32 maximum of their magnitudes; all maxima come first."""

    name = "int8"
    dtype = torch.float32

    def encode(self, vector: Tensor) -> bytes:
        return pack_int8(_flat(vector, self.dtype))

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        _check_size(self, data, n)
        return unpack_int8(bytearray(data), (n,), torch.float32) if n else torch.empty(0)

    def size_bytes(self, n: int) -> int:
        return -(-n // INT8_BLOCK) * (INT8_BLOCK + 4)


class _Int4:
    """A codec of blocks of 64 elements, each one of 15 multiples of a seventh of the block's largest magnitude. All
    sevenths come first, in float32; then two elements per byte."""

    name = "int4"
    dtype = torch.float32

    def encode(self, vector: Tensor) -> bytes:
        flat = _flat(vector, self.dtype)
        blocks = F.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
        units = blocks.abs().amax(1, keepdim=True) / _MOST_UNITS
        multiples = torch.where(units > 0, blocks / units, 0.0).nan_to_num_(0.0)
        codes = (multiples.round_().clamp_(-_MOST_UNITS, _MOST_UNITS) + _MOST_UNITS).to(torch.uint8).view(-1, 2)
        return units.numpy().tobytes() + (codes[:, 0] | codes[:, 1] << 4).numpy().tobytes()

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        _check_size(self, data, n)
        if not n:
            return torch.empty(0)
        num_blocks, found = -(-n // _BLOCK), bytearray(data)
        units = torch.frombuffer(found, dtype=torch.float32, count=num_blocks)
        packed = torch.frombuffer(found, dtype=torch.uint8, offset=4 * num_blocks)
        codes = torch.stack([packed & 15, packed >> 4], 1).view(-1, _BLOCK).float()
        return ((codes - _MOST_UNITS) * units[:, None]).view(-1)[:n].clone()

    def size_bytes(self, n: int) -> int:
        return -(-n // _BLOCK) * (_BLOCK // 2 + 4)


class _TwoBit:
    """A codec of blocks of 64 elements, each a sign and one of two magnitudes of its block: the mean of those above
    the block's mean, and the mean of the others. All magnitudes come first, in float16; then four elements per byte.

    It loses so much that it needs error feedback, see ``ErrorFeedback``.
    """

    name = TWO_BIT
    dtype = torch.float32

    def encode(self, vector: Tensor) -> bytes:
        flat = _flat(vector, self.dtype)
        n = len(flat)
        blocks = F.pad(flat, (0, -n % _BLOCK)).view(-1, _BLOCK)
        sizes, counts = blocks.abs(), torch.full((len(blocks), 1), float(_BLOCK))
        counts[-1:] -= -n % _BLOCK
        is_large = sizes > sizes.sum(1, keepdim=True) / counts
        num_large = is_large.sum(1, keepdim=True)
        large = torch.where(is_large, sizes, 0.0).sum(1, keepdim=True) / num_large.clamp_min(1)
        small = torch.where(is_large, 0.0, sizes).sum(1, keepdim=True) / (counts - num_large).clamp_min(1)
        codes = (is_large.to(torch.uint8) + 2 * (blocks < 0).to(torch.uint8)).view(-1, 4)
        packed = (codes << _SHIFTS).sum(1, dtype=torch.uint8)
        return _half(torch.cat([small, large], 1)).numpy().tobytes() + packed.numpy().tobytes()

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        _check_size(self, data, n)
        if not n:
            return torch.empty(0)
        num_blocks, found = -(-n // _BLOCK), bytearray(data)
        levels = torch.frombuffer(found, dtype=torch.float16, count=2 * num_blocks).view(-1, 2).float()
        packed = torch.frombuffer(found, dtype=torch.uint8, offset=4 * num_blocks)
        codes = ((packed[:, None] >> _SHIFTS) & 3).view(-1, _BLOCK).long()
        return torch.cat([levels, -levels], 1).gather(1, codes).view(-1)[:n].clone()

    def size_bytes(self, n: int) -> int:
        return -(-n // _BLOCK) * (_BLOCK // 4 + 4)


_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        _Float("fp32", torch.float32),
        _Float("fp16", torch.float16),
        _Int8(),
        _Int4(),
        _TwoBit(),
        _Float("fp64", torch.float64),
    )
}
CODEC_NAMES = tuple(_CODECS)


def codec_of(name: str) -> Codec:
    """Return the codec of that name. Raise ValueError if there is none."""
    if name not in _CODECS:
        raise ValueError(f"codec {name!r} is unknown: expected one of {', '.join(CODEC_NAMES)}")
    return _CODECS[name]


def _half(tensor: Tensor) -> Tensor:
    """Return the tensor in float16, with finite values clamped to its range."""
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-_MAX_FLOAT16, _MAX_FLOAT16)).half()


def _flat(vector: Tensor, dtype: torch.dtype) -> Tensor:
    if vector.dtype != dtype or vector.dim() != 1:
        expected = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"a {vector.dtype} tensor {list(vector.shape)} cannot be encoded: expected a flat {expected} vector"
        )
    return vector.detach().cpu().contiguous()


def _check_size(codec: Codec, data: bytes | memoryview, n: int) -> None:
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if size != codec.size_bytes(n):
        raise ValueError(f"{n} elements in {codec.name} take {codec.size_bytes(n)} bytes, not {size}")
