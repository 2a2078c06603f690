"""The header of a GGUF file, checked: its metadata values, and the positions of its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from swarm_models.checkpoints.safetensors_file import MAX_NAME, FileTensor, opened
from swarm_protocol.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 256 << 20  # the headers of the largest vocabularies have 20 MB
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Types by their numbers in ggml.h: name, elements per block, and bytes per block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: the shape of the unpacked numbers, outermost dimension first.
        type: a key of ``TYPES``.
        rows: the stored bytes, [rows, bytes of a row] uint8.
    """

    shape: tuple[int, ...]
    type: int
    rows: FileTensor


@dataclass(frozen=True)
class GgufHeader:
    """The header of one file: its ``values``, without arrays, and its ``tensors``, by llama.cpp's names."""

    values: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Return the architecture; empty in a shard that continues another file."""
        return str(self.values.get("general.architecture", ""))


def read_header(path: Path) -> GgufHeader:
    """Read a file's header, but no tensors.

    Raises:
        CheckpointError: the file is missing, is no GGUF file, is damaged, or holds an unknown type.
    """
    with opened(path) as file:
        return _Reader(path, file).read()


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size_bytes = os.fstat(file.fileno()).st_size

    def read(self) -> GgufHeader:
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path} is of version {version} of GGUF, expected 2 or 3, little endian")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            value = self._value(self._number("I"))
            if value is not None:
                values[key] = value
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise self._damaged("its general.alignment is no size")
        entries = [self._entry() for _ in range(num_tensors)]
        # Offsets count from the first aligned byte behind the header.
        start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_, offset in entries:
            tensors[name] = self._tensor(name, shape, type_, start + offset)
        return GgufHeader(values, tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], type_: int, offset: int) -> GgufTensor:
        if type_ not in TYPES:
            known = ", ".join(kind for kind, _, _ in TYPES.values())
            raise CheckpointError(f"{self._path} holds {name!r} in type {type_} of ggml: expected one of {known}")
        _, block, block_bytes = TYPES[type_]
        if shape[-1] % block:
            raise self._damaged(f"{name!r} has rows of {shape[-1]} numbers, which blocks of {block} do not divide")
        stored = (prod(shape[:-1]), shape[-1] // block * block_bytes)
        if offset + prod(stored) > self._size_bytes:
            raise CheckpointError(f"{self._path} is truncated: it ends before the end of {name!r}")
        return GgufTensor(shape, type_, FileTensor(name, self._path, torch.uint8, stored, offset))

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._text(), self._number("I")
        if len(name) > MAX_NAME or not 0 < num_dims <= _MAX_DIMS:
            raise self._damaged(f"it has a tensor {name[:MAX_NAME]!r} of {num_dims} dimensions")
        sizes = tuple(self._number("Q") for _ in range(num_dims))
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")  # ggml has the innermost size first

    def _value(self, kind: int) -> Any:
        """Read a value; skip an array and return None."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._format(kind))
        of, count = self._number("I"), self._number("Q")
        if of == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            self._skip(count * struct.calcsize(self._format(of)))
        return None

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._damaged(f"it has a value of type {kind}")
        return _NUMBERS[kind]

    def _number(self, format: str) -> Any:
        size = struct.calcsize(f"<{format}")
        data = self._file.read(size)
        if len(data) < size:
            raise self._damaged("it ends inside its header")
        return struct.unpack(f"<{format}", data)[0]

    def _text(self) -> str:
        length = self._number("Q")
        self._check(length)
        try:
            return self._file.read(length).decode()
        except UnicodeDecodeError:
            raise self._damaged("a name in it is no text") from None

    def _skip(self, length: int) -> None:
        self._check(length)
        self._file.seek(length, os.SEEK_CUR)

    def _check(self, length: int) -> None:
        if self._file.tell() + length > min(self._size_bytes, _MAX_HEADER_BYTES):
            raise self._damaged("it ends inside its header")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {why}")
