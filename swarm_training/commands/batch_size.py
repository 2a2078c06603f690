"""The search for how many samples a machine computes at once: the number doubles while it fits and is fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Trial:
    """The cost of computing a batch: seconds, and bytes in addition to the memory in use before."""

    batch_size: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class BatchSizeLimits:
    """The limits of the search.

    Attributes:
        seconds: the time that a batch may take: progress is reported between batches.
        memory_bytes: the memory for a batch; None: running out of memory ends the search.
    """

    max_size: int
    seconds: float = 10.0
    memory_bytes: int | None = None


def next_size(trials: list[Trial], limits: BatchSizeLimits) -> int | None:
    """Return the size to try next; None: keep the last one. Twice as many samples cost about twice as much."""
    if not trials:
        return 1
    last = trials[-1]
    fits = limits.memory_bytes is None or 2 * last.memory_bytes <= limits.memory_bytes
    if not fits or 2 * last.seconds > limits.seconds or 2 * last.batch_size > limits.max_size:
        return None
    return 2 * last.batch_size


def find_batch_size(compute: Callable[[int], Trial], limits: BatchSizeLimits) -> int:
    """Return the batch size, a power of 2. ``compute``: does forward and backward passes of so many samples.

    Raises:
        ValueError: there is no memory for a single sample.
    """
    trials: list[Trial] = []
    while (size := next_size(trials, limits)) is not None:
        try:
            trials.append(compute(size))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            break
    if not trials:
        raise ValueError("there is no memory to compute a single sample: expected a smaller model or block_length")
    return trials[-1].batch_size


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. CUDA has a class for that error; the CPU's allocator raises a RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def computing(model: nn.Module, loss_of: Callable[[int], torch.Tensor]) -> Callable[[int], Trial]:
    """Return a function that measures a pass over ``model`` and clears its gradients. ``loss_of``: size → loss."""
    on_cuda = next(model.parameters()).is_cuda
    at_first = _peak_bytes(on_cuda)  # the peak of the CPU's memory cannot be reset

    def compute(batch_size: int) -> Trial:
        if on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = _peak_bytes(on_cuda) if on_cuda else at_first
        began = time.perf_counter()
        try:
            loss_of(batch_size).backward()
            if on_cuda:
                torch.cuda.synchronize()
            return Trial(batch_size, time.perf_counter() - began, _peak_bytes(on_cuda) - before)
        finally:
            model.zero_grad(set_to_none=True)

    return compute


def free_memory_bytes(device: torch.device) -> int | None:
    """Return half of the free CPU memory: the system kills processes that take too much. None: a GPU, or unknown."""
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 // 2


def _peak_bytes(on_cuda: bool) -> int:
    if on_cuda:
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
