"""Settings with which the C library gives memory back while blocks are loaded and quantized.

glibc keeps freed pieces below a threshold that grows up to 32 MiB. Loading frees each block's weights once they are
quantized. The quantized weights lie between the kept pieces, which cost as much again [64 MB for 8 blocks of 34 MB].
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LOADING_BYTES = 128 * 1024  # larger pieces are mapped on their own and unmapped when freed; glibc's initial value
SERVING_BYTES = 32 * 1024 * 1024  # the largest value; keeps activations from being mapped again at every step


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Return large freed pieces to the system at once while the context is active. Do nothing without glibc."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        yield
        return
    mallopt(M_MMAP_THRESHOLD, LOADING_BYTES)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, SERVING_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * SERVING_BYTES)
