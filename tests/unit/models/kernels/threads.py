"""Threads for a kernel alone: what the test itself computes would spin on them, and take long on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on(threads: int) -> Iterator[None]:
    """Give torch so many threads while the context is active."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
