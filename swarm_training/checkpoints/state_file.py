"""The state of a run as a safetensors file, of which no more than one part or tensor is in memory at a time.

A state with its optimizer is several times as large as the weights. A peer therefore writes it to a file to send it,
and receives it into a file to load it: only the live state is in memory as a whole.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from swarm_models.checkpoints.safetensors_bytes import write_all
from swarm_models.checkpoints.safetensors_file import FileTensor, read_header_of
from swarm_protocol.errors import CheckpointError, SwarmError
from swarm_protocol.wire.constants import PART_BYTES

NO_STATE = "the state is no safetensors file of a training run"


class UnreadableState(SwarmError, OSError):
    """The file of a state can no longer be read, because its disk fails for instance."""


class StateFile:
    """An open file with a state. It stays readable if its name is changed or removed, and is closed when this object is
    collected as garbage. Several threads may read it; they raise UnreadableState if the disk fails. ``size_bytes``: the
    size of the file."""

    def __init__(self, file: BinaryIO) -> None:
        """Take over a file that is complete."""
        self._file = file
        self._lock = threading.Lock()
        self.size_bytes = file.seek(0, os.SEEK_END)
        weakref.finalize(self, file.close)

    @classmethod
    def open(cls, path: Path) -> StateFile:
        """Open a file on disk. Raise OSError if it cannot be read."""
        return cls(path.open("rb", buffering=0))

    @classmethod
    def of(cls, data: bytes) -> StateFile:
        """Return a state that is in memory."""
        return cls(io.BytesIO(data))

    def parts(self) -> Iterator[bytes]:
        """Yield the content in parts of the size in which it is sent."""
        for start in range(0, self.size_bytes, PART_BYTES):
            yield bytes(self._read(start, min(PART_BYTES, self.size_bytes - start)))

    def write_to(self, file: BinaryIO) -> None:
        """Copy the content to another file. Raise OSError if one of the disks fails, or is full."""
        for part in self.parts():
            write_all(file, part)

    def header(self) -> tuple[dict[str, FileTensor], str]:
        """Return the tensors by name, without their data, and the settings of the optimizer as JSON. Raise ValueError
        if the file is no state."""
        try:
            with self._lock, _readable():
                self._file.seek(0)
                tensors, metadata = read_header_of(self._file, Path("state"))
        except CheckpointError:
            raise ValueError(NO_STATE) from None
        if (settings := metadata.get("optimizer")) is None:
            raise ValueError(NO_STATE)
        return tensors, settings

    def tensor(self, entry: FileTensor) -> Tensor:
        """Read one of the tensors of ``header`` into memory of its own."""
        data = torch.empty(entry.size_bytes, dtype=torch.uint8)
        self._read_into(entry.offset, data.numpy().data)
        return data.view(entry.dtype).reshape(entry.shape)

    def _read(self, start: int, length: int) -> bytearray:
        data = bytearray(length)
        self._read_into(start, memoryview(data))
        return data

    def _read_into(self, start: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            with self._lock, _readable():  # the threads share one position in the file
                self._file.seek(start + done)
                count = self._file.readinto(data[done:])  # type: ignore[attr-defined]
                if not count:
                    raise OSError("it has become shorter")
            done += count


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableState(f"the file of a state cannot be read: {error.strerror or error}") from None


def temporary_file() -> BinaryIO:
    """Open a file without a name in the directory for temporary files; closing it removes it. It has no buffer, so that
    nothing is left to be written when it is closed. Raise SwarmError if there is no such directory, or it is full."""
    try:
        return tempfile.TemporaryFile(buffering=0)
    except OSError as error:
        raise no_room(error) from None


def no_room(error: OSError) -> SwarmError:
    """Return the error of a temporary file that cannot be written."""
    reason = error.strerror or error
    return SwarmError(f"temporary files for the state cannot be written: {reason}; set TMPDIR to a directory with room")
