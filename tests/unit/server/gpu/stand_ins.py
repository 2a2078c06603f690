"""A GPU's graphs and attention on a CPU: a tape that calls the same operators again, and sums over raw memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarm_server.gpu.row_tables import CAPACITY, KEYS, LENGTH, VALUES


class Tape(TorchDispatchMode):
    """Every call of an operator, with the tensors that it was given and those that it gave.

    As with a graph of a GPU, what Python does in between happens once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.is_paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default or torch.Tag.dynamic_output_shape in func.tags:
            raise RuntimeError(f"{func} would wait for the GPU")
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        for function, args, kwargs, before in self.calls:
            after = function(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """``num_recorded``: how many tapes there are."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.tape = Tape()

    def record(self, device: torch.device, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        self.tape = tape = Tape()
        with tape:
            compute()

        def play() -> None:
            with torch.no_grad():
                tape.play()

        return play


class RawAttention:
    """In fp32 and NumPy. Told to the recorder's tape, as torch does not see it."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder

    def store(self, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._taped(_store, table, keys, values)

    def attend(
        self, table: torch.Tensor, query: torch.Tensor, kv_heads: int, value_width: int, scaling: float
    ) -> torch.Tensor:
        return self._taped(attended, table, query, kv_heads, value_width, scaling)

    def _taped(self, function: Callable[..., Any], *args: Any) -> Any:
        tape = self._recorder.tape
        tape.is_paused = True
        try:
            result = function(*args)
        finally:
            tape.is_paused = False
        tape.calls.append((function, args, {}, result))
        return result


def _store(table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    for parts, key, value in zip(table.numpy(), keys[:, :, 0].numpy(), values[:, :, 0].numpy(), strict=True):
        if parts[0, LENGTH]:
            _memory(parts[0], KEYS, *key.shape)[:, -1] = key
            _memory(parts[0], VALUES, *value.shape)[:, -1] = value


def attended(table: torch.Tensor, query: torch.Tensor, kv_heads: int, value_width: int, scaling: float) -> torch.Tensor:
    """[rows, 1, heads, value_width] of fp32 [rows, heads, 1, width]."""
    rows, heads, _, width = query.shape
    output = np.zeros((rows, kv_heads, heads // kv_heads, value_width), dtype=np.float32)
    for row, parts in enumerate(table.numpy()):
        parts = [part for part in parts if part[LENGTH]]
        if not parts:
            continue
        keys = np.concatenate([_memory(part, KEYS, kv_heads, width) for part in parts], 1)
        values = np.concatenate([_memory(part, VALUES, kv_heads, value_width) for part in parts], 1)
        queries = query[row, :, 0].numpy().reshape(kv_heads, -1, width)
        scores = queries @ keys.transpose(0, 2, 1) * scaling
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        output[row] = weights / weights.sum(-1, keepdims=True) @ values
    return torch.from_numpy(output.reshape(rows, 1, heads, value_width))


def _memory(part: np.ndarray, field: int, heads: int, width: int) -> np.ndarray:
    """[heads, positions, width], where they lie."""
    num_floats = ((heads - 1) * part[CAPACITY] + part[LENGTH]) * width
    floats = np.ctypeslib.as_array((ctypes.c_float * int(num_floats)).from_address(int(part[field])))
    shape, strides = (heads, int(part[LENGTH]), width), (int(part[CAPACITY]) * width * 4, width * 4, 4)
    return np.lib.stride_tricks.as_strided(floats, shape, strides)
