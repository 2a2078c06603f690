"""The codecs of flat vectors: 8, 4, 2 or about 1 byte per element."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swarm_protocol.codecs.elements import pack_int8, unpack_int8
from swarm_protocol.codecs.sizes import INT8_BLOCK

_MAX_FLOAT16 = 65504.0


class Codec(Protocol):
    """An encoding of vectors of n elements as bytes. Vectors are float64 for ``fp64``, float32 for all other codecs.

    Values that are not finite stay not finite; in ``int8``, so does their whole block of 64 elements. Finite values
    beyond the range of ``fp16`` are clamped to it.
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
        if self._dtype == torch.float16:
            clamped = flat.clamp(-_MAX_FLOAT16, _MAX_FLOAT16)
            flat = torch.where(flat.isinf(), flat, clamped).half()
        return flat.numpy().tobytes()

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


_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        _Float("fp32", torch.float32),
        _Float("fp16", torch.float16),
        _Int8(),
        _Float("fp64", torch.float64),
    )
}
CODEC_NAMES = tuple(_CODECS)


def codec_of(name: str) -> Codec:
    """Return the codec of that name. Raise ValueError if there is none."""
    if name not in _CODECS:
        raise ValueError(f"codec {name!r} is unknown: expected one of {', '.join(CODEC_NAMES)}")
    return _CODECS[name]


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
