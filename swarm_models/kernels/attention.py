"""Attention of one new position per row by the C++ kernel, which reads keys and values in place."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int, c_long, c_void_p
from typing import NamedTuple

import torch

from swarm_models.kernels.library import CompiledFunctions, with_functions

_ROWS: list[type] = [c_void_p, c_void_p, c_long, c_void_p, c_void_p]
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "swarm_attention_isa_name": (c_char_p, [c_int]),
    "swarm_attention_isa_runs_here": (c_int, [c_int]),
    "swarm_store": (c_int, [*_ROWS, *[c_void_p, c_long, c_long] * 2, *[c_long] * 3]),
    "swarm_attend": (c_int, [*_ROWS, c_void_p, *[c_long] * 5, c_float, c_void_p, c_int, c_int]),
}


class Numbers:
    """An array of 64-bit integers at a fixed address."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._memory = array("q", numbers)
        self.address = self._memory.buffer_info()[0]


class PartOfPage(NamedTuple):
    """The positions ``start`` to ``start + length`` of one row of a page.

    Attributes:
        channels: the address of the page's ``channel_table``.
        run: the index into the channel numbers of keys and values.
    """

    channels: int
    capacity: int
    row: int
    start: int
    length: int
    run: int


class PagedRows:
    """The locations of the positions of a batch's rows, the same for all blocks that the rows go through."""

    def __init__(self, rows: Sequence[Sequence[PartOfPage]]) -> None:
        firsts = [0]
        for parts in rows:
            firsts.append(firsts[-1] + len(parts))
        self._keep([number for parts in rows for part in parts for number in part], firsts)

    @classmethod
    def of_one_part(cls, numbers: Sequence[int]) -> PagedRows:
        """Return rows of one part each; ``numbers`` are the fields of each part, in the order of ``PartOfPage``."""
        rows = cls(())
        rows._keep(numbers, range(len(numbers) // len(PartOfPage._fields) + 1))
        return rows

    def _keep(self, numbers: Sequence[int], firsts: Sequence[int]) -> None:
        self.num_rows = len(firsts) - 1
        self._memory = Numbers(numbers), Numbers(firsts)
        self.address, self.firsts = (numbers.address for numbers in self._memory)


def channel_table(data: Sequence[torch.Tensor]) -> Numbers:
    """Return the kernel's description of a page; data: per channel [rows, heads, capacity, width]."""
    table: list[int] = []
    for tensor in data:
        fits = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        table += (tensor.data_ptr() if fits else 0, tensor.shape[1], tensor.shape[3])  # 0: the kernel refuses the page
    return Numbers(table)


class AttentionKernel(CompiledFunctions):
    """The functions that store keys and values, and attend to them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Bind the functions of a library in which they are declared."""
        super().__init__(library.swarm_attention_isa_name, library.swarm_attention_isa_runs_here)
        self._store, self._attend = library.swarm_store, library.swarm_attend

    def store(
        self, rows: PagedRows, channels: tuple[Numbers, Numbers], keys: torch.Tensor, values: torch.Tensor
    ) -> bool:
        """Write keys and values, [rows, kv_heads, 1, width of each], to the last position of every row.

        Args:
            channels: the channel numbers of the keys and of the values, for each run.

        Returns:
            Whether they fit: one new position, fp32, in pages of such rows. If not, nothing is written.
        """
        if not (_is_plain(keys) and _is_plain(values) and keys.shape[:2] == values.shape[:2]):
            return False
        if len(keys) != rows.num_rows:
            return False
        failed = self._store(
            rows.address,
            rows.firsts,
            rows.num_rows,
            channels[0].address,
            channels[1].address,
            keys.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            values.data_ptr(),
            values.stride(0),
            values.stride(1),
            keys.shape[1],
            keys.shape[3],
            values.shape[3],
        )
        return not failed

    def attend(
        self,
        rows: PagedRows,
        channels: tuple[Numbers, Numbers],
        query: torch.Tensor,
        value_width: int,
        scaling: float | None,
    ) -> torch.Tensor | None:
        """Attend with query [rows, heads, 1, width] -> [rows, 1, heads, value_width]; return None if it cannot."""
        num_rows, heads, _, width = query.shape
        if not (_is_plain(query) and num_rows == rows.num_rows):
            return None
        output = torch.empty(num_rows, 1, heads, value_width)
        failed = self._attend(
            rows.address,
            rows.firsts,
            num_rows,
            channels[0].address,
            channels[1].address,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            heads,
            width,
            value_width,
            width**-0.5 if scaling is None else scaling,
            output.data_ptr(),
            self.isa,
            torch.get_num_threads(),
        )
        return None if failed else output


def _is_plain(new: torch.Tensor) -> bool:
    """Return whether the tensor is fp32 on the CPU, [rows, heads, 1, width] with contiguous width."""
    return (
        new.dtype == torch.float32
        and new.dim() == 4
        and new.shape[2] == 1
        and new.stride(3) == 1
        and new.device.type == "cpu"
    )


@functools.cache
def attention_kernel() -> AttentionKernel | None:
    """Return the kernel; None if it was not built here or ``SWARM_KERNEL`` is "off"."""
    library = with_functions(_SIGNATURES)
    return None if library is None else AttentionKernel(library)
