"""The search for how many samples a machine computes at once: the number doubles while it fits and is fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swarm_models.out_of_memory import is_out_of_memory
from swarm_protocol.system import available_bytes, peak_resident_bytes, restart_peak


@dataclass(frozen=True)
class Trial:
    """The cost of computing a batch: seconds, and bytes in addition to the memory in use before."""

    batch_size: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class BatchSizeLimits:
    """The limits of the search."""

    max_size: int
    seconds: float = 10.0  # the time that a batch may take: progress is reported between batches
    memory_bytes: int | None = None  # the memory for a batch; None: running out of memory ends the search


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
    """Return the batch size, a power of 2. ``compute``: does forward and backward passes of so many samples. Raise
    ValueError if there is no memory for a single sample."""
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


def computing(model: nn.Module, loss_of: Callable[[int], torch.Tensor]) -> Callable[[int], Trial]:
    """Return a function that measures a pass over ``model`` and clears its gradients. ``loss_of``: size → loss."""
    device = next(model.parameters()).device
    backend: Any = None if device.type == "cpu" else torch.get_device_module(device)
    restart_peak()
    at_first = _peak_bytes(device)  # later trials use memory again that earlier ones have freed

    def compute(batch_size: int) -> Trial:
        if backend is not None:
            backend.empty_cache()
            if device.type != "mps":
                backend.reset_peak_memory_stats()
        before = at_first if backend is None else _peak_bytes(device)
        began = time.perf_counter()
        try:
            loss_of(batch_size).backward()
            if backend is not None:
                backend.synchronize()
            return Trial(batch_size, time.perf_counter() - began, _peak_bytes(device) - before)
        finally:
            model.zero_grad(set_to_none=True)

    return compute


def free_memory_bytes(device: torch.device) -> int | None:
    """Return half of the free memory of the CPU, because the system kills processes that take too much; None: a GPU."""
    return available_bytes() // 2 if device.type == "cpu" else None


def _peak_bytes(device: torch.device) -> int:
    if device.type == "mps":  # no peak is known, but memory that was used stays with the driver for the next use
        return torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        peak: int = torch.get_device_module(device).max_memory_allocated()
        return peak
    return peak_resident_bytes()
