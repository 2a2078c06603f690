"""A safetensors file in memory, written and read beside a running event loop.

``safetensors.torch.save`` and ``load`` hold the GIL while they copy, about a second per gigabyte. Even in a thread,
they stop the event loop. This module copies through an anonymous file of the kernel instead: file I/O and torch release
the GIL. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from swarm_models.checkpoints.safetensors_file import DTYPES, LENGTH_BYTES, METADATA

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # the data begins at a multiple of this many bytes


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file. Raises the same errors as ``write``."""
    with _anonymous_file() as file:
        write(file, tensors, metadata)
        file.seek(0)
        return file.read()


def write(
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    value_of: Callable[[Tensor], Tensor] = Tensor.detach,
) -> None:
    """Write tensors on any device to a safetensors file, one at a time to save memory.

    The tensors must not change meanwhile, unless ``value_of`` returns a copy: ``value_of`` gets each tensor just before
    the tensor is written.

    Raises:
        ValueError: a tensor has a dtype that the format does not know.
        OSError: the file cannot be written.
    """
    header, ordered = _layout(tensors, metadata)
    write_all(file, header)
    for _, tensor in ordered:
        write_all(file, data_of(value_of(tensor)))


def data_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on any device, in the order of its elements."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def size_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> int:
    """Return the size of the file that ``write`` writes, without reading the tensors. Raises the same ValueError."""
    return len(_layout(tensors, metadata)[0]) + sum(tensor.nbytes for tensor in tensors.values())


def _layout(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[tuple[str, Tensor]]]:
    """Return the beginning of the file, and the tensors in the order in which their data follow."""
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    # The widest dtype comes first, so that each tensor begins at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    at = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"the tensor {name!r} is of {tensor.dtype}, which safetensors files cannot hold")
        offsets = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded, ordered


def from_bytes(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, which are writable, and the metadata.

    All tensors share the memory of one file: copy the ones to keep, so that the rest is freed.

    Raises:
        safetensors.SafetensorError: the bytes are not a safetensors file, or a dtype is unsupported.
    """
    try:
        tensors, metadata = _read(data)
    except KeyError as error:
        raise SafetensorError(f"it has numbers of a type that torch does not know: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise SafetensorError(f"the tensor {name!r} is of {tensor.dtype}, which is not supported")
    return tensors, metadata


def _read(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not hasattr(os, "memfd_create"):  # ``safe_open`` takes a path, which only a file of Linux's memory has
        size = int.from_bytes(data[:LENGTH_BYTES], "little")
        return load(data), json.loads(data[LENGTH_BYTES:][:size]).get(METADATA, {})
    with _anonymous_file() as file:
        write_all(file, data)
        with safe_open(f"/proc/self/fd/{file.fileno()}", "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118


def _anonymous_file() -> BinaryIO:
    """Open an unnamed file, in memory where the system supports it, else on disk."""
    if hasattr(os, "memfd_create"):
        return io.FileIO(os.memfd_create("safetensors"), "r+")
    return tempfile.TemporaryFile(buffering=0)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of the data to a file, which may have no buffer. Raises OSError if the file cannot be written."""
    rest = memoryview(data)
    while rest:  # one system call writes 2 GB at most
        rest = rest[file.write(rest) :]
