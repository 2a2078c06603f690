"""Ways to give unused memory back to the system.

Requests that were cut off leave tensors in cycles of references. Python finds such cycles late, because it counts
objects, not bytes. The C library keeps freed memory for itself.

Until version 2.38, glibc does not reuse the pieces that are left of aligned allocations, as all tensors are
(https://sourceware.org/bugzilla/show_bug.cgi?id=14581). A server that computes large passes grows by 50 MB with every
few passes. The pages of such pieces can be given back.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

GROWN_BYTES = 64 << 20  # growth of the process after which it is trimmed
MUCH_BYTES = 16 << 20  # after a trim that gave back so much, the next call trims too
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LOADING_BYTES = 128 * 1024  # larger pieces are mapped on their own and unmapped when freed; glibc's initial value
SERVING_BYTES = 32 * 1024 * 1024  # the largest value; keeps activations from being mapped again at every step
MAX_LOOKS = 16  # calls from one trim to the next while a process is large and gives nothing back


class HeapTrimmer:
    """A trimmer of the memory of this process."""

    def __init__(
        self,
        resident_bytes: Callable[[], int] | None = None,
        trim: Callable[[], object] | None = None,
    ) -> None:
        """Prepare to trim. ``resident_bytes`` and ``trim`` replace the system's. Without glibc, nothing is trimmed."""
        self._resident_bytes = resident_bytes or _resident_bytes
        malloc_trim = _of_glibc("malloc_trim")
        self._trim = trim or (malloc_trim and partial(malloc_trim, 0))
        self._last_bytes = 0  # the size after the last trim
        self._least_bytes = sys.maxsize  # the smallest size after any trim
        self._gave_much = False  # whether the last trim gave much; there may be more now, if much was in use
        self._looks = 0  # calls since the last trim
        self._max_looks = 1  # doubled each time that a trim gives little

    async def trim(self) -> None:
        """Trim if the process has grown since the last trim, or gave back much then. It takes about 0.2 s.

        Also trim, with backoff, while the process is larger than it has been: memory that was in use at the last trim
        may be free now, which does not show as growth.
        """
        if self._trim is None:
            return
        before_bytes = self._resident_bytes()
        self._looks += 1
        has_grown = before_bytes >= self._last_bytes + GROWN_BYTES
        is_due = self._looks >= self._max_looks and before_bytes >= self._least_bytes + GROWN_BYTES
        if has_grown or self._gave_much or is_due:
            gc.collect()  # here, since it holds the interpreter anyway; the C library's part runs beside the event loop
            await asyncio.to_thread(self._trim)
            self._last_bytes = self._resident_bytes()
            self._least_bytes = min(self._least_bytes, self._last_bytes)
            self._gave_much = before_bytes - self._last_bytes >= MUCH_BYTES
            self._max_looks = 1 if has_grown or self._gave_much else min(2 * self._max_looks, MAX_LOOKS)
            self._looks = 0


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Return large freed pieces to the system at once while blocks are loaded and quantized; needs glibc.

    glibc keeps freed pieces below a threshold that grows up to 32 MiB. Loading frees each block's weights once they are
    quantized. The quantized weights lie between the kept pieces, which cost as much again [64 MB for 8 blocks of
    34 MB].
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, LOADING_BYTES)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, SERVING_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * SERVING_BYTES)


def _of_glibc(name: str) -> Callable[..., object] | None:
    """Return a function of the C library; None if this is not glibc."""
    try:
        function: Callable[..., object] = getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None
    return function
