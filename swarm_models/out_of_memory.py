"""The errors by which torch and Python say that memory ran out."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. CUDA has a class for that error; others raise a RuntimeError."""
    words = ("can't allocate memory", "not enough memory", "out of memory")  # of Linux, Windows and mps
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in str(error) for each in words)
