"""The codecs of flat vectors. They take 8, 4, 2, about 1, about a half or about a third of a byte per element."""

from __future__ import annotations

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


class Codec:
    """An encoding of vectors of n elements as bytes. Vectors are float64 for ``fp64``, float32 for all other codecs.

    Values that are not finite stay so; in ``int8``, ``int4`` and ``2bit`` their whole block of 64 elements becomes not
    finite. ``fp16`` and ``2bit`` clamp finite values to the range of float16.
    """

    def __init__(self, name: str, block_bytes: int, block: int = _BLOCK, dtype: torch.dtype = torch.float32) -> None:
        """Set the size in bytes of a block of ``block`` elements, and the type of the vectors."""
        self.name = name
        self.dtype = dtype  # the type of the vectors
        self._block, self._block_bytes = block, block_bytes

    def encode(self, vector: Tensor) -> bytes:
        """Return the bytes of a vector, [n] of ``dtype``."""
        if vector.dtype != self.dtype or vector.dim() != 1:
            expected = str(self.dtype).removeprefix("torch.")
            raise ValueError(
                f"a {vector.dtype} tensor {list(vector.shape)} cannot be encoded: expected a flat {expected} vector"
            )
        return self._encoded(vector.detach().cpu().contiguous())

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        """Return a vector, [n] of ``dtype``, that owns its memory. Raise ValueError if the size is not that of n."""
        size = len(data) if isinstance(data, bytes) else data.nbytes
        if size != self.size_bytes(n):
            raise ValueError(f"{n} elements in {self.name} take {self.size_bytes(n)} bytes, not {size}")
        return self._decoded(bytearray(data), n) if n else torch.empty(0, dtype=self.dtype)

    def size_bytes(self, n: int) -> int:
        """Return the number of bytes of n encoded elements."""
        return -(-n // self._block) * self._block_bytes

    def _encoded(self, flat: Tensor) -> bytes:
        raise NotImplementedError

    def _decoded(self, data: bytearray, n: int) -> Tensor:
        raise NotImplementedError


class _Float(Codec):
    """A codec that stores elements in a floating-point type."""

    def __init__(self, name: str, stored: torch.dtype) -> None:
        super().__init__(name, stored.itemsize, 1, torch.float64 if stored == torch.float64 else torch.float32)
        self._stored = stored

    def _encoded(self, flat: Tensor) -> bytes:
        return (_half(flat) if self._stored == torch.float16 else flat).numpy().tobytes()

    def _decoded(self, data: bytearray, n: int) -> Tensor:
        return torch.frombuffer(data, dtype=self._stored).to(self.dtype)


class _Int8(Codec):
    """A codec of blocks of 64 int8 elements with the float32 maximum of their magnitudes; all maxima come first."""

    def _encoded(self, flat: Tensor) -> bytes:
        return pack_int8(flat)

    def _decoded(self, data: bytearray, n: int) -> Tensor:
        return unpack_int8(data, (n,), torch.float32)


class _Int4(Codec):
    """A codec of blocks of 64 elements. Each element is one of 15 multiples, -7 to 7, of a seventh of the block's
    largest magnitude. All sevenths come first, in float32; then two elements per byte."""

    def _encoded(self, flat: Tensor) -> bytes:
        blocks = F.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
        units = blocks.abs().amax(1, keepdim=True) / _MOST_UNITS
        multiples = torch.where(units > 0, blocks / units, 0.0).nan_to_num_(0.0)
        codes = (multiples.round_().clamp_(-_MOST_UNITS, _MOST_UNITS) + _MOST_UNITS).to(torch.uint8).view(-1, 2)
        return units.numpy().tobytes() + (codes[:, 0] | codes[:, 1] << 4).numpy().tobytes()

    def _decoded(self, data: bytearray, n: int) -> Tensor:
        num_blocks = -(-n // _BLOCK)
        units = torch.frombuffer(data, dtype=torch.float32, count=num_blocks)
        packed = torch.frombuffer(data, dtype=torch.uint8, offset=4 * num_blocks)
        codes = torch.stack([packed & 15, packed >> 4], 1).view(-1, _BLOCK).float()
        return ((codes - _MOST_UNITS) * units[:, None]).view(-1)[:n].clone()


class _TwoBit(Codec):
    """A codec of blocks of 64 elements. Each element is a sign and one of two magnitudes of its block: the mean of the
    magnitudes above the block's mean magnitude, and the mean of all others. All magnitudes come first, in float16; then
    four elements per byte.

    It loses so much that it needs error feedback, see ``ErrorFeedback``.
    """

    def _encoded(self, flat: Tensor) -> bytes:
        n = len(flat)
        blocks = F.pad(flat, (0, -n % _BLOCK)).view(-1, _BLOCK)
        sizes, counts = blocks.abs(), torch.full((len(blocks), 1), float(_BLOCK))
        counts[-1:] -= -n % _BLOCK  # the padding of the last block is no element of its means
        is_large = sizes > sizes.sum(1, keepdim=True) / counts
        num_large = is_large.sum(1, keepdim=True)
        large = torch.where(is_large, sizes, 0.0).sum(1, keepdim=True) / num_large.clamp_min(1)
        small = torch.where(is_large, 0.0, sizes).sum(1, keepdim=True) / (counts - num_large).clamp_min(1)
        codes = (is_large.to(torch.uint8) + 2 * (blocks < 0).to(torch.uint8)).view(-1, 4)
        packed = (codes << _SHIFTS).sum(1, dtype=torch.uint8)
        return _half(torch.cat([small, large], 1)).numpy().tobytes() + packed.numpy().tobytes()

    def _decoded(self, data: bytearray, n: int) -> Tensor:
        num_blocks = -(-n // _BLOCK)
        levels = torch.frombuffer(data, dtype=torch.float16, count=2 * num_blocks).view(-1, 2).float()
        packed = torch.frombuffer(data, dtype=torch.uint8, offset=4 * num_blocks)
        codes = ((packed[:, None] >> _SHIFTS) & 3).view(-1, _BLOCK).long()
        return torch.cat([levels, -levels], 1).gather(1, codes).view(-1)[:n].clone()


_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        _Float("fp32", torch.float32),
        _Float("fp16", torch.float16),
        _Int8("int8", INT8_BLOCK + 4, INT8_BLOCK),
        _Int4("int4", _BLOCK // 2 + 4),
        _TwoBit(TWO_BIT, _BLOCK // 4 + 4),
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
