"""Threads for a kernel alone: what the test itself computes would spin on them, and take long on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@pytest.fixture(params=[1, 2])
def threads(request) -> int:
    return request.param


@contextmanager
def on(threads: int) -> Iterator[None]:
    """Give torch so many threads while the context is active."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def instructions(kernel: Any, name: str) -> Iterator[None]:
    """Have the kernel use an instruction set while the context is active."""
    before = kernel.name
    kernel.choose(name)
    yield
    kernel.choose(before)


def inputs(rows: int, width: int) -> torch.Tensor:
    """Return [rows, width]: one row of zeros, and one with an outlier."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    if rows > 2:
        x[1] = 0
        x[2, 0] = 6000
    return x
