"""Room for keys and values outside the cache: first in CPU memory, then in a file on disk.

Entries are bytes under a key. Those that are only kept make room for others, the least recently used first: from
memory to disk and then away. Those that are held, for sessions that are parked, stay until they are released.
The file has no name, so that the system frees it however the process ends, and other users cannot open it.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import platformdirs
import torch

from swarm_protocol.errors import PeerBusy
from swarm_protocol.wire.constants import MIB

CHUNK_BYTES = 64 * 1024  # of the file; an entry takes whole chunks
_MOST_QUEUED_BYTES = 64 * MIB  # that wait to be written; entries beyond them are dropped, so that nobody waits
_PATIENCE_S = 10.0  # how long anybody waits for a disk that is busy
_NUM_THREADS = 4  # for calls that may wait for the disk
_PAUSE_S = 60.0  # how long nothing is written after an error of the disk
_logger = logging.getLogger(__name__)
P = TypeVar("P")
T = TypeVar("T")


class _Tier(Generic[P]):
    """The entries in one kind of memory, and where each of them is."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._held_bytes = 0
        self._places: dict[bytes, tuple[P, int]] = {}
        self._holds: Counter[bytes] = Counter()
        self._oldest_first: OrderedDict[bytes, None] = OrderedDict()  # those that nobody holds, by their last use

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    @property
    def unheld_bytes(self) -> int:
        """Return the room that is not held."""
        return self.capacity_bytes - self._held_bytes

    def can_hold(self, size_bytes: int) -> bool:
        """Return whether so much more fits beside what is held."""
        return size_bytes <= self.unheld_bytes

    def add(self, key: bytes, place: P, size_bytes: int) -> None:
        self._places[key] = place, size_bytes
        self._oldest_first[key] = None
        self.used_bytes += size_bytes

    def use(self, key: bytes) -> P:
        """Return where an entry is; from now on it is the most recently used one."""
        if key in self._oldest_first:
            self._oldest_first.move_to_end(key)
        return self._places[key][0]

    def pop(self, key: bytes) -> P:
        """Remove an entry that nobody holds, and return where it is."""
        del self._oldest_first[key]
        place, size_bytes = self._places.pop(key)
        self.used_bytes -= size_bytes
        return place

    def next_to_drop(self, more_bytes: int = 0) -> bytes | None:
        """Return None if so much more fits beside all entries, else the least recently used entry that nobody holds."""
        return next(iter(self._oldest_first)) if self.used_bytes + more_bytes > self.capacity_bytes else None

    def hold(self, key: bytes) -> None:
        if key in self._oldest_first:
            del self._oldest_first[key]
            self._held_bytes += self._places[key][1]
        self._holds[key] += 1

    def release(self, key: bytes) -> bool:
        """Take one hold back. Return whether nobody holds the entry any more."""
        self._holds[key] -= 1
        if self._holds[key]:
            return False
        del self._holds[key]
        self._oldest_first[key] = None
        self._held_bytes -= self._places[key][1]
        return True


class _Chunks(NamedTuple):
    """The chunks of the file that have an entry's bytes."""

    numbers: list[int]
    size_bytes: int


class _File:
    """A file without a name, whose chunks are given out and taken back."""

    def __init__(self, directory: Path | None) -> None:
        """Create the file. Raises OSError if that is not possible."""
        where = platformdirs.user_cache_path("swarm") if directory is None else directory
        where.mkdir(parents=True, exist_ok=True)
        # Not buffered, because whole chunks are written and read; open until ``close``.
        self._file: Any = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115
        self._free: list[int] = []
        self._num_chunks = 0
        self._lock = threading.Lock()  # guards the position in the file

    def take(self, size_bytes: int) -> _Chunks:
        """Return chunks for so many bytes. The caller makes sure that there are enough."""
        count = num_chunks(size_bytes)
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        more = range(self._num_chunks, self._num_chunks + count - len(taken))
        self._num_chunks += len(more)
        return _Chunks([*taken, *more], size_bytes)

    def give_back(self, chunks: _Chunks) -> None:
        self._free += chunks.numbers

    def write(self, chunks: _Chunks, data: torch.Tensor) -> None:
        """Write bytes into these chunks. Raises OSError, as if the disk is full."""
        with self._exclusively(_PATIENCE_S):
            self._transfer(self._file.write, chunks, data)

    def read(self, chunks: _Chunks, patience_s: float) -> torch.Tensor:
        """Return what was written into these chunks. Raises OSError, also if the file is in use for ``patience_s``."""
        data = torch.empty(chunks.size_bytes, dtype=torch.uint8)
        with self._exclusively(patience_s):
            self._transfer(self._file.readinto, chunks, data)
        return data

    @contextmanager
    def _exclusively(self, patience_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=patience_s):
            raise OSError("the disk is busy")
        try:
            yield
        finally:
            self._lock.release()

    def _transfer(self, call: Callable[[memoryview], int], chunks: _Chunks, data: torch.Tensor) -> None:
        """Write or read all chunks by ``call``, which may do less at a time. The caller holds the lock."""
        view = memoryview(data.numpy().data)
        for number, chunk in enumerate(chunks.numbers):
            self._file.seek(chunk * CHUNK_BYTES)
            part = view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            while part:
                count = call(part)
                if not count:
                    raise OSError("the file of keys and values has ended")
                part = part[count:]

    def close(self) -> None:
        with suppress(OSError), self._exclusively(_PATIENCE_S):
            self._file.close()


class KvOffload:
    """The entries in CPU memory and on disk. Thread-safe."""

    def __init__(self, memory_bytes: int = 0, disk_bytes: int = 0, directory: Path | None = None) -> None:
        """Start empty; without room, nothing is kept or held.

        Args:
            directory: where the file is; None means the user's cache directory.

        Raises:
            OSError: there is to be a file, and it cannot be created.
        """
        self._memory: _Tier[torch.Tensor] = _Tier(memory_bytes)
        self._disk: _Tier[_Chunks] = _Tier(disk_bytes // CHUNK_BYTES * CHUNK_BYTES)
        self._file = _File(directory) if self._disk.capacity_bytes else None
        self._waiting: dict[bytes, torch.Tensor] = {}  # to be written to disk
        self._waiting_bytes = 0
        self._is_closed = False
        self._writes_from_s = 0.0  # the time at which the disk is tried again
        self._changed = threading.Condition(threading.RLock())
        self._writer = ThreadPoolExecutor(1, "write-kv") if self._file else None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "park-kv")

    @property
    def capacity_bytes(self) -> dict[str, int]:
        """Return the room by place: ``memory`` and ``disk``."""
        return {"memory": self._memory.capacity_bytes, "disk": self._disk.capacity_bytes}

    @property
    def used_bytes(self) -> dict[str, int]:
        """Return the bytes of all entries by place: ``memory`` and ``disk``."""
        return {"memory": self._memory.used_bytes, "disk": self._disk.used_bytes}

    @property
    def is_used(self) -> bool:
        """Return whether anything can be kept or held at all."""
        return self._memory.capacity_bytes + self._disk.capacity_bytes > 0

    def __contains__(self, key: bytes) -> bool:
        with self._changed:
            return key in self._waiting or key in self._memory or key in self._disk

    def can_hold(self, size_bytes: int, num_entries: int) -> bool:
        """Return whether so many entries of so many bytes in all fit beside what is held."""
        with self._changed:
            for_disk_bytes = size_bytes - self._memory.unheld_bytes
            # Each entry may leave nearly a whole chunk of the file empty.
            return for_disk_bytes <= 0 or for_disk_bytes + num_entries * CHUNK_BYTES <= self._disk.unheld_bytes

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that may wait for the disk, in a thread for such calls alone, and return its result.

        Raise PeerBusy after ``close``.
        """
        # Not asyncio.to_thread, whose few threads others need too, and for which the end of the event loop waits.
        with self._changed:
            if self._is_closed:
                raise PeerBusy("the keys and values outside the cache have been dropped")
            calling = self._threads.submit(function, *arguments)
        return await asyncio.wrap_future(calling)

    def keep(self, key: bytes, size_bytes: int, pack: Callable[[], torch.Tensor]) -> None:
        """Keep an entry of this size while there is room.

        ``pack`` returns its bytes. It is called only if they are to be stored.
        """
        if not self.is_used:
            return
        with self._changed:
            tier = self._tier_of(key)
            if tier is not None:
                tier.use(key)
            if key in self or not (self._memory.can_hold(size_bytes) or self._can_write_later(size_bytes)):
                return
        data = pack()
        with self._changed:
            if key not in self and not self._is_closed:
                self._place(key, data)

    def hold_known(self, key: bytes) -> bool:
        """Hold an entry that is known; return False if it is not, or if the disk is busy with it for long.

        Each hold is released separately.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key not in self._waiting, _PATIENCE_S):
                return False
            tier = self._tier_of(key)
            if tier is not None:
                tier.hold(key)
            return tier is not None

    def hold(self, key: bytes, data: torch.Tensor) -> bool:
        """Hold an entry, [bytes] uint8, until it is released. Returns False if there is no room. May wait for the disk.

        Each hold is released separately.
        """
        with self._changed:
            if self.hold_known(key):
                return True
            if self._is_closed or key in self._waiting:
                return False
            if self._memory.can_hold(data.numel()):
                self._memory.add(key, data, data.numel())
                self._memory.hold(key)
                self._demote()
                return True
            self._wait_for_disk(key, data)
        return self._write(key)

    def release(self, key: bytes, *, keeps: bool) -> None:
        """Release an entry once. When nobody holds it any more, it is dropped, or kept while there is room."""
        with self._changed:
            tier = self._tier_of(key)
            if tier is None:
                assert self._is_closed, "held entries are not dropped"
            elif tier.release(key) and not keeps:
                self._drop(key)

    def read(self, key: bytes, patience_s: float = _PATIENCE_S) -> torch.Tensor | None:
        """Return an entry's bytes, [bytes] uint8, which nobody may change; None if it is unknown or cannot be read.

        ``patience_s``: how long to wait for a disk that is busy.
        """
        with self._changed:
            if key in self._waiting:
                return self._waiting[key]
            if key in self._memory:
                return self._memory.use(key)
            if self._file is None or key not in self._disk:
                return None
            chunks = self._disk.use(key)
            self._disk.hold(key)  # while it is read
        try:
            return self._file.read(chunks, patience_s)
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            _logger.warning("keys and values cannot be read from disk: %s", error)
            return None
        finally:
            self.release(key, keeps=True)

    def close(self) -> None:
        """Drop everything; nothing is kept or held any more. Wait at most ``_PATIENCE_S`` for a write that hangs."""
        with self._changed:
            self._is_closed = True
        self._threads.shutdown(wait=False)  # calls that wait for a thread still end: nobody has cancelled their callers
        if self._writer is not None:
            self._writer.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            self._waiting.clear()
            self._memory, self._disk = _Tier(0), _Tier(0)
            self._changed.notify_all()
        if self._file is not None:
            self._file.close()

    def _write(self, key: bytes) -> bool:
        """Write an entry that waits, and hold it. Return False, and drop it, if that is not possible."""
        with self._changed:
            data = self._waiting.get(key)
            if data is None:  # everything was dropped meanwhile
                return False
            chunks = self._reserved(key, data.numel())
        is_written = False
        try:
            if self._file is not None and chunks is not None:
                self._file.write(chunks, data)
                is_written = True
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._writes_from_s = time.monotonic() + _PAUSE_S
            if not self._is_closed:
                _logger.warning("keys and values cannot be written to disk for %.0f s: %s", _PAUSE_S, error)
        finally:
            with self._changed:
                self._waiting.pop(key, None)
                self._waiting_bytes -= data.numel()
                if not is_written and chunks is not None:
                    self.release(key, keeps=False)  # ``_reserved`` holds it
                self._changed.notify_all()
        return is_written

    def _write_unheld(self, key: bytes) -> None:
        if self._write(key):
            self.release(key, keeps=True)

    # ------------------------------------------------------------ the caller holds the lock

    def _tier_of(self, key: bytes) -> _Tier[Any] | None:
        return next((tier for tier in (self._memory, self._disk) if key in tier), None)

    def _drop(self, key: bytes) -> None:
        if key in self._memory:
            self._memory.pop(key)
        elif self._file is not None:
            self._file.give_back(self._disk.pop(key))

    def _place(self, key: bytes, data: torch.Tensor) -> None:
        if self._memory.can_hold(data.numel()):
            self._memory.add(key, data, data.numel())
            self._demote()
        else:
            self._write_later(key, data)

    def _demote(self) -> None:
        """Move the least recently used entries from memory to disk until the rest fits."""
        while (oldest := self._memory.next_to_drop()) is not None:
            self._write_later(oldest, self._memory.pop(oldest))

    def _write_later(self, key: bytes, data: torch.Tensor) -> None:
        """Write an entry in the writer's thread; drop it if there is no disk, or if the disk is too slow."""
        if self._writer is not None and self._can_write_later(data.numel()):
            self._wait_for_disk(key, data)
            self._writer.submit(self._write_unheld, key)

    def _can_write_later(self, size_bytes: int) -> bool:
        return (
            self._writer is not None
            and not self._is_closed
            and self._waiting_bytes + size_bytes <= _MOST_QUEUED_BYTES
            and time.monotonic() >= self._writes_from_s
        )

    def _wait_for_disk(self, key: bytes, data: torch.Tensor) -> None:
        self._waiting[key] = data
        self._waiting_bytes += data.numel()

    def _reserved(self, key: bytes, size_bytes: int) -> _Chunks | None:
        """Drop old entries until one of this size fits on disk. Return its chunks, which are held, or None."""
        total_bytes = num_chunks(size_bytes) * CHUNK_BYTES
        if self._file is None or not self._disk.can_hold(total_bytes) or time.monotonic() < self._writes_from_s:
            return None
        while (oldest := self._disk.next_to_drop(total_bytes)) is not None:
            self._drop(oldest)
        chunks = self._file.take(size_bytes)
        self._disk.add(key, chunks, total_bytes)
        self._disk.hold(key)
        return chunks


def num_chunks(size_bytes: int) -> int:
    """Return how many chunks of the file so many bytes take."""
    return -(-size_bytes // CHUNK_BYTES)
