"""The int8 weights that the C++ kernel multiplies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Self

import torch

from swarm_models.kernels.huge_pages import in_huge_pages
from swarm_models.kernels.int8_linear import TILE, Int8Weight
from swarm_models.kernels.library import Address, kernel

STRIP, STEP = 64, 4  # outputs and inputs of the packed weight are padded to multiples of these
FAST = ("avx512-vnni", "avx-vnni", "neon-dotprod")


class KernelWeight(Int8Weight):
    """A weight in the kernel's layout: one byte per element and an fp32 scale per output channel.

    The arithmetic is that of ``FbgemmWeight``: two digits to base 128 per activation, with a unit per row, and exact
    integer products, so that no bit of a row depends on the others. Gradients use the same bytes.

    Attributes:
        parts: the contiguous tensors that hold the whole weight: another weight with the same bytes is equal.
    """

    FORMAT: ClassVar[str] = (
        "int8-rows-strips64-1"  # identifies the layout and the rounding of ``parts``; must change with the bytes
    )

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self._place(q.shape, scale.contiguous())
        self._library.pack(q.contiguous(), self._packed)

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Self:
        """Create a weight whose ``parts`` are still to be filled."""
        weight = cls.__new__(cls)
        weight._place(torch.Size(shape), torch.empty(shape[0], dtype=torch.float32))
        return weight

    @classmethod
    def from_tiles(cls, shape: Sequence[int], tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Self:
        """Pack each tile at its place, which works because tiles consist of whole strips."""
        weight, start = cls.empty(shape), 0
        for q, scale in tiles:
            weight._library.pack(q.contiguous(), weight._packed[packed_bytes(start, shape[1]) :])
            weight._scale[start : start + len(q)] = scale
            start += len(q)
        return weight

    def part(self, rows: slice) -> Self:
        """Return a weight with these rows alone, copied. The first must begin a strip."""
        part = self.empty((rows.stop - rows.start, self.shape[1]))
        start = packed_bytes(rows.start, self.shape[1])
        part._packed.copy_(self._packed[start : start + len(part._packed)])
        part._scale.copy_(self._scale[rows])
        return part

    def _place(self, shape: torch.Size, scale: torch.Tensor) -> None:
        library = kernel()
        assert library is not None, "is_available() has not been asked"
        self._library = library
        self.shape, self._scale = shape, scale
        self._packed = in_huge_pages(packed_bytes(*shape))
        self.parts: tuple[torch.Tensor, ...] = (self._packed, self._scale)
        self.address = Address(self._packed.data_ptr(), self._scale.data_ptr())
        self.size_bytes = self._packed.nbytes + self._scale.nbytes

    @classmethod
    def is_available(cls) -> bool:
        return kernel() is not None

    @classmethod
    def is_fastest(cls) -> bool:
        """Return whether this is faster here than torch; fbgemm is faster on processors with only AVX2."""
        library = kernel()
        return library is not None and library.name in FAST

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul_shared(x, (self,))[0]

    @staticmethod
    def matmul_shared(x: torch.Tensor, weights: Sequence[KernelWeight]) -> list[torch.Tensor]:
        """Return the product with each weight; the digits of x are computed once."""
        ys = [torch.empty(len(x), weight.shape[0], dtype=torch.float32) for weight in weights]
        weights[0]._library.matmul(x.contiguous(), [weight.address for weight in weights], ys)
        return ys

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(grad), self.shape[1], dtype=torch.float32)
        self._library.matmul_transposed(grad.contiguous(), self.address, y)
        return y

    def tiles(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        num_channels, width = self.shape
        for start in range(0, num_channels, TILE):
            stop = min(start + TILE, num_channels)
            q = torch.empty(stop - start, width, dtype=torch.int8)
            self._library.unpack(self.address.packed, start, q)
            yield slice(start, stop), q, self._scale[start:stop]


def packed_bytes(num_channels: int, width: int) -> int:
    return -(-num_channels // STRIP) * STRIP * (-(-width // STEP) * STEP)
