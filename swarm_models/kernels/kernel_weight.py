"""Weights in the layouts of the C++ kernel: what they have in common, and the int8 layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch

from swarm_models.kernels.huge_pages import in_huge_pages
from swarm_models.kernels.int8_linear import TILE, Int8Weight
from swarm_models.kernels.library import Address, Kernel, kernel
from swarm_models.kernels.quantized_linear import QuantizedWeight

STRIP, STEP = 64, 4  # outputs and inputs of the packed weight are padded to multiples of these
# Instruction sets with which the kernel is faster than fbgemm and torch; plain C++ is not.
FAST = ("avx512-vnni", "avx-vnni", "avx2", "neon-dotprod")


class PackedWeight(QuantizedWeight):
    """A weight in a layout of the kernel, in strips of 64 outputs, which is made of bytes alone.

    Attributes:
        FORMAT: identifies the layout and the rounding of ``parts``; it must change with the bytes.
        parts: the contiguous tensors that hold the whole weight: another weight with the same bytes is equal.
    """

    FORMAT: ClassVar[str]
    _multiply: ClassVar[Callable[..., None]]
    parts: tuple[torch.Tensor, ...]
    address: Any  # as the kernel takes it

    def __init__(self, q: torch.Tensor, scales: torch.Tensor) -> None:
        self._place(q.shape)
        self._fill(q, scales)

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Self:
        """Create a weight whose ``parts`` are still to be filled."""
        weight = cls.__new__(cls)
        weight._place(torch.Size(shape))
        return weight

    @classmethod
    def from_tiles(cls, shape: Sequence[int], tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Self:
        """Pack each tile at its place, which works because tiles consist of whole strips."""
        weight, start = cls.empty(shape), 0
        for q, scales in tiles:
            weight._fill(q, scales, start)
            start += len(q)
        return weight

    @classmethod
    def is_available(cls) -> bool:
        return kernel() is not None

    @staticmethod
    @abstractmethod
    def packed_bytes(num_channels: int, width: int) -> int:
        """Return the bytes of the packed integers of a weight of this shape."""

    def part(self, rows: slice) -> Self:
        """Return a weight with these rows alone, copied. The first must begin a strip."""
        part = self.empty((rows.stop - rows.start, self.shape[1]))
        start = self.packed_bytes(rows.start, self.shape[1])
        part._packed.copy_(self._packed[start : start + len(part._packed)])
        return part

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul_shared(x, (self,))[0]

    @staticmethod
    def matmul_shared(x: torch.Tensor, weights: Sequence[PackedWeight]) -> list[torch.Tensor]:
        """Return the product with each weight, all of one kind; the digits of x are computed once."""
        ys = [torch.empty(len(x), weight.shape[0], dtype=torch.float32) for weight in weights]
        weights[0]._multiply(weights[0]._library, x.contiguous(), [weight.address for weight in weights], ys)
        return ys

    def _place(self, shape: torch.Size) -> None:
        """Allocate the memory of the weight."""
        library = kernel()
        assert library is not None, "is_available() has not been asked"
        self._library, self.shape = library, shape
        self._packed = in_huge_pages(self.packed_bytes(*shape))
        self.parts, self.address, self.size_bytes = (self._packed,), self._packed.data_ptr(), self._packed.nbytes

    @abstractmethod
    def _fill(self, q: torch.Tensor, scales: torch.Tensor, start: int = 0) -> None:
        """Pack rows, [rows, in], with their scales to the place of the row ``start`` and those after it."""


class KernelWeight(PackedWeight, Int8Weight):
    """A weight with one byte per element and an fp32 scale per output channel.

    The arithmetic is that of ``FbgemmWeight``: two digits to base 128 per activation, with a unit per row, and exact
    integer products, so that no bit of a row depends on the others. Gradients use the same bytes.
    """

    FORMAT = "int8-rows-strips64-1"
    _multiply = staticmethod(Kernel.matmul)
    address: Address

    @classmethod
    def is_fastest(cls) -> bool:
        """Return whether this is faster here than fbgemm and torch; without vector instructions it is not."""
        library = kernel()
        return library is not None and library.name in FAST

    @staticmethod
    def packed_bytes(num_channels: int, width: int) -> int:
        return -(-num_channels // STRIP) * STRIP * (-(-width // STEP) * STEP)

    def part(self, rows: slice) -> Self:
        part = super().part(rows)
        part._scale.copy_(self._scale[rows])
        return part

    def _place(self, shape: torch.Size) -> None:
        super()._place(shape)
        self._scale = torch.empty(shape[0], dtype=torch.float32)
        self.parts += (self._scale,)
        self.address = Address(self._packed.data_ptr(), self._scale.data_ptr())
        self.size_bytes += self._scale.nbytes

    def _fill(self, q: torch.Tensor, scales: torch.Tensor, start: int = 0) -> None:
        self._library.pack(q.contiguous(), self._packed[self.packed_bytes(start, q.shape[1]) :])
        self._scale[start : start + len(q)] = scales

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
