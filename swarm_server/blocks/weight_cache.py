"""Packed weights on disk, so that the next start need not read, round and pack the weights of the checkpoint.

Weights are read into memory of their own, not mapped. A file that is missing, damaged, unreadable or of another version
is a cache miss. A file that cannot be written is skipped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import platformdirs
import torch

from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_models.kernels.kernel_weight import PackedWeight
from swarm_protocol.atomic_file import ABANDONED_S, PARTIAL_SUFFIX, written_atomically

_logger = logging.getLogger(__name__)
_SUFFIX = ".weight"
_MAX_HEADER_BYTES = 4096
_PAGE_BYTES = 4096
_SAMPLE_BYTES = 4096
_FREE_SHARE = 0.1  # share of the disk that the cache leaves free


W = TypeVar("W", bound=PackedWeight)


def content_key(stored: StoredTensor, packing: str) -> str:
    """Return a name for the result of ``packing`` a tensor on disk; it differs once the tensor may have changed.

    The name depends on how the tensor is made of its pieces, on each piece's place in its file, and on a sample of its
    data. The file's device, inode, size, mtime and ctime count too. The system sets ctime, which cannot be set back.
    Raises CheckpointError or OSError.
    """
    digest = hashlib.sha256(json.dumps([packing, stored.name, stored.recipe]).encode())
    for piece in stored.pieces:
        status = os.stat(piece.path)
        file = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        tensor = [piece.name, str(piece.dtype), list(piece.shape), piece.offset, piece.size_bytes]
        digest.update(json.dumps([file, tensor]).encode())
        digest.update(piece.sample(_SAMPLE_BYTES))
    return digest.hexdigest()


class WeightCache:
    """The cache of all servers of this user on this machine. These may read, write and evict at the same time."""

    def __init__(self, budget_bytes: int, directory: Path | None = None) -> None:
        """Open the cache. It keeps about ``budget_bytes`` of the weights used last; 0 turns the cache off."""
        self._budget_bytes = budget_bytes
        self._directory = directory or platformdirs.user_cache_path("swarm") / "weights"
        self._used: set[Path] = set()
        self._oldest_first: list[tuple[Path, int]] | None = None  # files that may be evicted, with their bytes
        self._total_bytes = 0
        self._cannot_read = self._cannot_write = False

    def read(self, key: str, kind: type[W], shape: Sequence[int]) -> W | None:
        """Return the weight, or None if it is missing, damaged or unreadable."""
        if not self._budget_bytes or self._cannot_read:
            return None
        path = self._path(key)
        try:
            weight = _read(path, key, kind, shape)
            os.utime(path)  # the cache evicts the files with the oldest times first
        except FileNotFoundError:
            return None
        except ValueError as error:
            _logger.warning("the packed weight %s cannot be used and is made again: %s", path, error)
            return None
        except OSError as error:
            self._cannot_read = True
            _logger.warning("packed weights of earlier starts are made again: %s", error)
            return None
        self._used.add(path)
        return weight

    def write(self, key: str, weight: PackedWeight) -> None:
        """Write the weight. Do nothing if there is no room, or if writing has failed before."""
        size_bytes = sum(part.nbytes for part in weight.parts)
        if not self._budget_bytes or self._cannot_write:
            return
        path = self._path(key)
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._make_room(size_bytes):
                return
            with written_atomically(path) as partial:
                _write(partial, key, weight)
        except OSError as error:
            self._cannot_write = True
            _logger.warning("packed weights are not kept for the next start: %s", error)
            return
        self._used.add(path)
        self._total_bytes += size_bytes

    def _path(self, key: str) -> Path:
        return self._directory / f"{key[:40]}{_SUFFIX}"  # the header has the whole key

    def _make_room(self, size_bytes: int) -> bool:
        """Delete the least recently used files, but none that this server has used; return whether there is room."""
        if self._oldest_first is None:
            self._oldest_first = self._find_files()
            self._total_bytes = sum(size for _, size in self._oldest_first)
        while self._total_bytes + size_bytes > self._budget_bytes and self._oldest_first:
            path, freed_bytes = self._oldest_first.pop(0)
            if path not in self._used:
                path.unlink(missing_ok=True)
                self._total_bytes -= freed_bytes
        disk = shutil.disk_usage(self._directory)
        if disk.free - size_bytes < _FREE_SHARE * disk.total:
            raise OSError(f"{self._directory} is on a disk of which less than {_FREE_SHARE:.0%} would be left free")
        return self._total_bytes + size_bytes <= self._budget_bytes

    def _find_files(self) -> list[tuple[Path, int]]:
        """Return the packed weights, oldest first. Delete partial files of servers that were killed while writing."""
        found = []
        for entry in os.scandir(self._directory):
            try:
                status = entry.stat()
                if entry.name.endswith(_SUFFIX):
                    found.append((status.st_mtime, Path(entry.path), status.st_size))
                elif entry.name.endswith(PARTIAL_SUFFIX) and time.time() - status.st_mtime > ABANDONED_S:
                    os.unlink(entry.path)
            except FileNotFoundError:  # another server has deleted it
                continue
        return [(path, size_bytes) for _, path, size_bytes in sorted(found)]


# ---------------------------------------------------------------- files: length of the header, header, parts


def _read(path: Path, key: str, kind: type[W], shape: Sequence[int]) -> W:
    """Read a weight. Raise OSError, or ValueError if the file is not what it should be."""
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError("it has no header")
        header = json.loads(file.read(header_bytes))
        weight = kind.empty(shape)
        expected = _header(key, weight, checksum=header.get("checksum") if isinstance(header, dict) else None)
        if header != expected or size_bytes != 8 + header_bytes + sum(part.nbytes for part in weight.parts):
            raise ValueError("it is another weight, or incomplete")
        for part in weight.parts:
            data = part.view(torch.uint8).numpy().data.cast("B")
            while data:
                count = file.readinto(data)
                if not count:
                    raise ValueError("it ends too early")
                data = data[count:]
    if _checksum(weight.parts) != header["checksum"]:
        raise ValueError("its checksum is wrong")
    return weight


def _write(path: Path, key: str, weight: PackedWeight) -> None:
    header = json.dumps(_header(key, weight, _checksum(weight.parts))).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for part in weight.parts:
            file.write(part.view(torch.uint8).numpy().data)


def _header(key: str, weight: PackedWeight, checksum: str | None) -> dict[str, object]:
    parts = [[str(part.dtype), list(part.shape)] for part in weight.parts]
    return {"key": key, "format": weight.FORMAT, "shape": list(weight.shape), "parts": parts, "checksum": checksum}


def _checksum(parts: Sequence[torch.Tensor]) -> str:
    """Return a digest over the sum of each page: adding is as fast as reading, and one changed bit changes a sum."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.view(torch.uint8)
        whole = len(data) // _PAGE_BYTES * _PAGE_BYTES
        if whole:
            sums = data[:whole].view(torch.int64).view(-1, _PAGE_BYTES // 8).sum(1)
            digest.update(sums.numpy().tobytes())
        digest.update(data[whole:].numpy().tobytes())
    return digest.hexdigest()
