"""One safetensors file: its header, checked, and its tensors, each read into memory of its own.

The ``safetensors`` library maps files into memory. A server must not keep mapped weights: they break if any process
rewrites the file, and their memory looks like page cache. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch

from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import parse_object

MAX_HEADER_BYTES = 32 << 20  # enough for 300 000 tensors; the format allows 100 MB, which can take gigabytes to parse
MAX_NAME = 512  # characters of a tensor's name
MAX_DIMS = 16
MAX_SIZE = 1 << 48  # limit of one dimension, and of offsets
METADATA = "__metadata__"  # a key of the header: strings that describe no tensor
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
FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}


class StoredTensor(ABC):
    """A tensor on disk. ``stored[...]`` reads it, which is how transformers reads a tensor lazily.

    Attributes:
        dtype, shape: the dtype and shape of the tensor that ``read`` returns.
        has_tiles: whether ``tiles`` can read the tensor in parts.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    has_tiles = False

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Return the data as a new tensor; raise CheckpointError if a file is damaged."""

    def tiles(self, min_rows: int) -> Iterator[torch.Tensor]:
        """Yield consecutive rows, along the first dimension, as new tensors.

        All tiles but the last have the same number of rows, a multiple of ``min_rows``. A tensor that cannot be read in
        parts comes whole. Raises CheckpointError if a file is damaged.
        """
        yield self.read()

    @property
    @abstractmethod
    def pieces(self) -> tuple[FileTensor, ...]:
        """Return the tensors of files from which this tensor is made."""

    @property
    def recipe(self) -> str:
        """Return how the pieces are combined: the same pieces with another recipe give another tensor."""
        return ""

    @property
    def size_bytes(self) -> int:
        """Return the size in memory of the tensor after it is read."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, everything: Any) -> torch.Tensor:
        assert everything is ..., "a stored tensor is read whole"
        return self.read()


@dataclass(frozen=True)
class FileTensor(StoredTensor):
    """A tensor that lies in a file as it is."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file, in bytes
    has_tiles = True

    @property
    def pieces(self) -> tuple[FileTensor, ...]:
        return (self,)

    def read(self) -> torch.Tensor:
        return self._read(self.offset, self.shape)

    def tiles(self, min_rows: int) -> Iterator[torch.Tensor]:
        for start in range(0, self.shape[0], min_rows):
            yield self.rows(start, start + min_rows)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read the rows from ``start`` to ``stop``, or to the last row if there are fewer."""
        _, *inner = self.shape
        row_bytes = prod(inner) * self.dtype.itemsize
        return self._read(self.offset + start * row_bytes, (min(stop, self.shape[0]) - start, *inner))

    def _read(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        data = torch.empty(prod(shape) * self.dtype.itemsize, dtype=torch.uint8)
        _read_into(self.path, offset, data.numpy().data)
        return data.view(self.dtype).reshape(shape)

    def sample(self, max_bytes: int) -> bytes:
        """Return up to ``max_bytes`` from the middle of the tensor's data."""
        data = bytearray(min(self.size_bytes, max_bytes))
        _read_into(self.path, self.offset + (self.size_bytes - len(data)) // 2, memoryview(data))
        return bytes(data)


def filled(shape: Sequence[int], dtype: torch.dtype, tiles: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of this shape whose rows are the rows of ``tiles``, in order."""
    whole = torch.empty(shape, dtype=dtype)
    start = 0
    for tile in tiles:
        whole[start : start + len(tile)] = tile
        start += len(tile)
    return whole


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a file, by name, without reading their data.

    Raises:
        CheckpointError: the file is missing, is no safetensors file, or has another length than its header says.
    """
    with opened(path) as file:
        return _tensors(path, *_read_json(file, path))


def read_metadata(path: Path) -> dict[str, str]:
    """Return the header's metadata strings; raise CheckpointError if the file is missing or no safetensors file."""
    with opened(path) as file:
        return _metadata(_read_json(file, path)[0], path)


def read_header_of(file: BinaryIO, path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return what the header of an open file says: the tensors by name, without their data, and the metadata strings.

    ``path`` appears in errors and in the tensors. Raises the CheckpointErrors of ``read_header`` and ``read_metadata``.
    """
    entries, data_start, size_bytes = _read_json(file, path)
    return _tensors(path, entries, data_start, size_bytes), _metadata(entries, path)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open the file. Raise CheckpointError if it cannot be read while the context is active."""
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _tensors(path: Path, entries: Mapping[str, Any], data_start: int, size_bytes: int) -> dict[str, FileTensor]:
    described = {name: fields for name, fields in entries.items() if name != METADATA}
    tensors = {name: _entry(name, path, data_start, fields) for name, fields in described.items()}
    _require_whole(path, data_start, size_bytes, tensors)
    return tensors


def _metadata(entries: Mapping[str, Any], path: Path) -> dict[str, str]:
    metadata = entries.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path} is damaged: the header's {METADATA} is not an object of strings")
    return metadata


def _read_json(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header, the offset of the data, and the size of the file."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size_bytes < LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} is no safetensors file")
    if LENGTH_BYTES + header_bytes > size_bytes:
        raise CheckpointError(f"{path} is truncated: it ends inside its header")
    entries = parse_object(file.read(header_bytes), f"{path} is no safetensors file: its header")
    return entries, LENGTH_BYTES + header_bytes, size_bytes


def _entry(name: str, path: Path, data_start: int, fields: Any) -> FileTensor:
    damaged = f"{path} is damaged: the header's entry of {name[:MAX_NAME]!r}"
    if len(name) > MAX_NAME:
        raise CheckpointError(f"{damaged} has a name of more than {MAX_NAME} characters")
    if not isinstance(fields, dict) or not isinstance(fields.get("dtype"), str):
        raise CheckpointError(f"{damaged} has no dtype")
    dtype, shape, offsets = DTYPES.get(fields["dtype"]), fields.get("shape"), fields.get("data_offsets")
    if dtype is None:
        raise CheckpointError(f"{path} holds {name!r} as {fields['dtype'][:MAX_NAME]!r}, which is not supported")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{damaged} has no shape of at most {MAX_DIMS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{damaged} does not say where its data begin and end")
    begin, end = offsets
    if end - begin != prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path} is damaged: the size of {name!r} does not fit its shape {shape}")
    return FileTensor(name, path, dtype, tuple(shape), data_start + begin)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_SIZE for value in values)


def _require_whole(path: Path, data_start: int, size_bytes: int, tensors: dict[str, FileTensor]) -> None:
    """Raise CheckpointError unless the tensors' data follow one another without gaps to the end of the file."""
    expected = max((tensor.offset + tensor.size_bytes for tensor in tensors.values()), default=data_start)
    if expected != size_bytes:
        state = "truncated" if size_bytes < expected else "damaged"
        raise CheckpointError(f"{path} is {state}: its header speaks of {expected} bytes, the file has {size_bytes}")
    end = data_start
    # By size, too: an empty tensor has the offset of the tensor behind it.
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        if tensor.offset != end:
            what = "overlap those of another tensor" if tensor.offset < end else "begin after a gap"
            raise CheckpointError(f"{path} is damaged: the data of {tensor.name!r} {what}")
        end += tensor.size_bytes


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
