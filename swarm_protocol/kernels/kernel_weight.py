"""int8 weights that are multiplied by the C++ kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Self

import torch

from swarm_protocol.kernels.huge_pages import in_huge_pages
from swarm_protocol.kernels.int8_linear import TILE, Int8Weight
from swarm_protocol.kernels.library import Address, kernel

STRIP, STEP = 64, 4  # the packed weight is padded to multiples of these outputs and inputs
FAST = ("avx512-vnni", "avx-vnni", "neon-dotprod")


class KernelWeight(Int8Weight):
    """A weight as the kernel reads it: one byte per element and an fp32 scale per output channel.

    The arithmetic is that of ``FbgemmWeight``: two digits to base 128 per activation in a unit of the row's own, exact
    integer products, so that no bit of a row depends on the others. Gradients are computed from the same bytes.

    Attributes:
        parts: all that the weight is made of, contiguous: with the same bytes in them, another one is the same weight.
    """

    FORMAT: ClassVar[str] = (
        "int8-rows-strips64-1"  # of ``parts``, and how they are rounded: another one for other bytes
    )

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self._place(q.shape, scale.contiguous())
        self._library.pack(q.contiguous(), self._packed)

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Self:
        """Whose ``parts`` are to be filled."""
        weight = cls.__new__(cls)
        weight._place(torch.Size(shape), torch.empty(shape[0], dtype=torch.float32))
        return weight

    @classmethod
    def from_tiles(cls, shape: Sequence[int], tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Self:
        """Packs each tile where it belongs: tiles of whole strips can be joined."""
        weight, start = cls.empty(shape), 0
        for q, scale in tiles:
            weight._library.pack(q.contiguous(), weight._packed[packed_bytes(start, shape[1]) :])
            weight._scale[start : start + len(q)] = scale
            start += len(q)
        return weight

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
        """Whether it multiplies faster here than torch: with AVX2 alone, fbgemm does."""
        library = kernel()
        return library is not None and library.name in FAST

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul_shared(x, (self,))[0]

    @staticmethod
    def matmul_shared(x: torch.Tensor, weights: Sequence[KernelWeight]) -> list[torch.Tensor]:
        """The product with each weight, for which x is written as digits once."""
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
