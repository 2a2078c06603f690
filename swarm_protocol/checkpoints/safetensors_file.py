"""One safetensors file: its header, checked, and its tensors, read one at a time into memory of their own.

The ``safetensors`` library maps files into memory; a server that keeps mapped weights loses them to any process that
rewrites the file and cannot tell its own memory from the page cache. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from swarm_protocol.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
LENGTH_BYTES = 8  # the file begins with the header's length, little endian

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies on disk. ``stored[...]`` reads it, which is how transformers reads a tensor lazily."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file
    size_bytes: int

    def __getitem__(self, everything: Any) -> torch.Tensor:
        assert everything is ..., "a stored tensor is read whole"
        return self.read()

    def read(self) -> torch.Tensor:
        data = torch.empty(self.size_bytes, dtype=torch.uint8)
        _read_into(self.path, self.offset, data.numpy().data)
        return data.view(self.dtype).reshape(self.shape)

    def sample(self, max_bytes: int) -> bytes:
        """Up to ``max_bytes`` from the middle of the tensor's data."""
        data = bytearray(min(self.size_bytes, max_bytes))
        _read_into(self.path, self.offset + (self.size_bytes - len(data)) // 2, memoryview(data))
        return bytes(data)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name, without reading them.

    Raises:
        CheckpointError: if the file is missing, is no safetensors file, or is shorter or longer than its header says.
    """
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size_bytes < LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is no safetensors file")
            if LENGTH_BYTES + header_bytes > size_bytes:
                raise CheckpointError(f"{path} is truncated: it ends inside its header")
            header = json.loads(file.read(header_bytes))
        tensors = {
            name: _entry(name, path, LENGTH_BYTES + header_bytes, fields)
            for name, fields in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no safetensors file: its header is damaged") from error
    expected = max((tensor.offset + tensor.size_bytes for tensor in tensors.values()), default=size_bytes)
    if expected != size_bytes:
        state = "truncated" if size_bytes < expected else "damaged"
        raise CheckpointError(f"{path} is {state}: its header speaks of {expected} bytes, the file has {size_bytes}")
    return tensors


def _entry(name: str, path: Path, data_start: int, fields: dict[str, Any]) -> StoredTensor:
    dtype, shape = DTYPES.get(fields["dtype"]), tuple(fields["shape"])
    if dtype is None:
        raise CheckpointError(f"{path} holds {name!r} as {fields['dtype']}, which is not supported")
    begin, end = fields["data_offsets"]
    if end - begin != prod(shape) * dtype.itemsize or begin < 0:
        raise CheckpointError(f"{path} is damaged: the size of {name!r} does not fit its shape {list(shape)}")
    return StoredTensor(name, path, dtype, shape, data_start + begin, end - begin)


def _read_into(path: Path, offset: int, data: memoryview) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(data):
                count = file.readinto(data[done:])
                if not count:
                    raise CheckpointError(f"{path} is truncated")
                done += count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
