"""Codecs: how a vector of float32 becomes bytes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 64  # elements of int8 that share one maximum


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    def encode(self, vector: Tensor) -> bytes:
        """``vector``: [n] float32."""

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        """[n] float32; raises ValueError if the bytes are not as many as ``size_bytes`` says."""

    def size_bytes(self, n: int) -> int: ...


@dataclass(frozen=True)
class _Cast:
    name: str
    dtype: torch.dtype

    def encode(self, vector: Tensor) -> bytes:
        return bytes(vector.to(self.dtype).contiguous().numpy().tobytes())

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        _require_size(self, data, n)
        return torch.frombuffer(bytearray(data), dtype=self.dtype).float() if n else torch.zeros(0)

    def size_bytes(self, n: int) -> int:
        return n * self.dtype.itemsize


@dataclass(frozen=True)
class _Int8:
    """Blocks of 64 elements: float32 maxima of all blocks, then the int8 values."""

    name: str = "int8"

    def encode(self, vector: Tensor) -> bytes:
        blocks = torch.nn.functional.pad(vector, (0, -len(vector) % _BLOCK)).view(-1, _BLOCK)
        maxima = blocks.abs().amax(1)
        values = (blocks * (127 / maxima.clamp(min=1e-30))[:, None]).round_().to(torch.int8)
        return bytes(maxima.numpy().tobytes() + values.numpy().tobytes())

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        _require_size(self, data, n)
        if not n:
            return torch.zeros(0)
        num_blocks = -(-n // _BLOCK)
        buffer = bytearray(data)
        maxima = torch.frombuffer(buffer, dtype=torch.float32, count=num_blocks)
        values = torch.frombuffer(buffer, dtype=torch.int8, offset=4 * num_blocks).view(num_blocks, _BLOCK)
        return (values * (maxima / 127)[:, None]).view(-1)[:n]

    def size_bytes(self, n: int) -> int:
        return -(-n // _BLOCK) * (_BLOCK + 4)


_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (_Cast("fp32", torch.float32), _Cast("fp16", torch.float16), _Int8())
}


def codec_of(name: str) -> Codec:
    """Raises ValueError if there is none of that name."""
    if name not in _CODECS:
        raise ValueError(f"codec {name!r} is unknown: expected one of {', '.join(_CODECS)}")
    return _CODECS[name]


def _require_size(codec: Codec, data: bytes | memoryview, n: int) -> None:
    if len(data) != codec.size_bytes(n):
        raise ValueError(f"{n} elements of {codec.name} take {codec.size_bytes(n)} bytes, and not {len(data)}")
