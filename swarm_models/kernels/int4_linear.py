"""Int4 weights on CPU: half a byte per weight, and two bytes per group of 32 inputs; fp32 in and out.

``KernelInt4Weight`` uses the C++ kernel. ``PlainInt4Weight`` uses torch alone, and is slow. Their results are equal
bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch

from swarm_models.kernels.int8_linear import TILE, TINY
from swarm_models.kernels.kernel_weight import STRIP, PackedWeight
from swarm_models.kernels.library import Kernel
from swarm_models.kernels.quantized_linear import QuantizedWeight

GROUP = 32  # inputs that share a scale and a zero point
GROUP_BYTES = STRIP * (2 + GROUP // 2)  # for the 64 outputs that are packed together
LEVELS = 15
CLIPPED = 0.97  # fraction of the range; it minimises the error of normally distributed weights


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to asymmetric int4 per output channel and group of 32 inputs: ``weight ≈ (q - zero) * scale``, rounded.

    weight: [out, in], any float dtype and strides -> q: [out, in] uint8 from 0 to 15, groups: [out, groups] int16.
    A group is the upper 12 bits of the fp32 scale, with the zero point in the lower four bits. Never holds more than
    ``TILE`` rows in fp32.
    """
    num_channels, width = weight.shape
    num_groups = -(-width // GROUP)
    q = torch.empty(weight.shape, dtype=torch.uint8)
    groups = torch.empty(num_channels, num_groups, dtype=torch.int16)
    for q_tile, groups_tile, rows in zip(q.split(TILE), groups.split(TILE), weight.split(TILE), strict=True):
        tile = torch.zeros(len(rows), num_groups * GROUP, dtype=torch.float32)
        tile[:, :width] = rows
        tile = tile.view(len(rows), num_groups, GROUP)
        low, high = tile.amin(-1).clamp_(max=0), tile.amax(-1).clamp_(min=0)  # so that zeros stay zeros
        scale = _rounded_scale(((high - low) * (CLIPPED / LEVELS)).clamp_(min=TINY))
        zero = ((LEVELS - (low + high) / scale) / 2).round_().clamp_(0, LEVELS)
        groups_tile.copy_(_scale_and_zero(scale, zero))
        rounded = tile.div_(scale[..., None]).round_().add_(zero[..., None]).clamp_(0, LEVELS)
        q_tile.copy_(rounded.view(len(rows), -1)[:, :width])
    return q, groups


def groups_of(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return [out, groups] like ``quantize_groups``, for scales above 0 (kept to 12 bits) and zero points."""
    return _scale_and_zero(_rounded_scale(scale.float().clamp(min=TINY)), zero).to(torch.int16)


def _rounded_scale(scale: torch.Tensor) -> torch.Tensor:
    """Round to the upper 12 bits after the sign bit, in place; the scale must be contiguous fp32."""
    # Adds half of the lowest bit that stays. A carry goes into the exponent, as rounding up to a power of two must.
    return scale.view(torch.int32).add_(1 << 18).bitwise_and_(-1 << 19).view(torch.float32)


def _scale_and_zero(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return int32 values whose lower 16 bits are groups: 12 bits of the scale, then 4 of the zero point."""
    return (scale.view(torch.int32) >> 15).bitwise_or_(zero.int())


def scales_and_zeros(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points, both in fp32 and in the shape of ``groups``."""
    bits = groups.int() & 0xFFFF
    return ((bits & 0xFFF0) << 15).view(torch.float32), (bits & 15).float()


class Int4Weight(QuantizedWeight):
    """One frozen weight [out, in] as ``quantize_groups`` returns it.

    An activation is ``unit * n``, with a unit per row and n an integer of 14 bits. The product with a group is exact in
    integers. Scaled products are added in fp32 in the order of the inputs: no bit of a row depends on the other rows.
    """

    @abstractmethod
    def tiles(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield tile by tile (output channels, dequantised weight: [tile, in] fp32, valid until the next tile)."""

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(grad), self.shape[1], dtype=torch.float32)
        for channels, tile in self.tiles():
            total.addmm_(grad[:, channels], tile)
        return total

    def dequantize(self) -> torch.Tensor:
        weight = torch.empty(self.shape, dtype=torch.float32)
        for channels, tile in self.tiles():
            weight[channels] = tile
        return weight


class KernelInt4Weight(PackedWeight, Int4Weight):
    """A weight in the kernel's layout: strips of 64 outputs, each in groups of 32 inputs."""

    FORMAT = "int4-groups32-strips64-1"
    _multiply = staticmethod(Kernel.matmul4)
    address: int

    @staticmethod
    def packed_bytes(num_channels: int, width: int) -> int:
        return -(-num_channels // STRIP) * -(-width // GROUP) * GROUP_BYTES

    def _fill(self, q: torch.Tensor, scales: torch.Tensor, start: int = 0) -> None:
        self._library.pack4(q.contiguous(), scales.contiguous(), self._packed[self.packed_bytes(start, q.shape[1]) :])

    def tiles(self) -> Iterator[tuple[slice, torch.Tensor]]:
        num_channels, width = self.shape
        buffer = torch.empty(min(TILE, num_channels), width, dtype=torch.float32)
        for start in range(0, num_channels, TILE):
            tile = buffer[: num_channels - start]
            self._library.unpack4(self.address, start, tile)
            yield slice(start, start + len(tile)), tile


class PlainInt4Weight(Int4Weight):
    """A weight with two elements per byte, multiplied by torch: the integers of a group are exact in fp32, too."""

    CHUNK = 8  # groups expanded at a time

    def __init__(self, q: torch.Tensor, groups: torch.Tensor) -> None:
        self.shape = q.shape
        padded = torch.zeros(len(q), groups.shape[1] * GROUP, dtype=torch.uint8)
        padded[:, : q.shape[1]] = q
        self._pairs = padded[:, ::2] | padded[:, 1::2] << 4
        self._groups = groups
        self.size_bytes = self._pairs.nbytes + groups.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        num_groups = self._groups.shape[1]
        units, integers = _in_integers(x)
        padded = torch.zeros(len(x), num_groups * GROUP, dtype=torch.float32)
        padded[:, : x.shape[1]] = integers
        by_group = padded.view(len(x), num_groups, GROUP).transpose(0, 1)
        total = torch.zeros(len(x), self.shape[0], dtype=torch.float32)
        for start in range(0, num_groups, self.CHUNK):
            some = slice(start, start + self.CHUNK)
            scales, zeros = scales_and_zeros(self._groups[:, some])
            levels = self._levels(slice(None), some) - zeros[..., None]
            products = by_group[some] @ levels.permute(1, 2, 0)  # [groups, rows, out]: integers below 2**24
            for product, scale in zip(products, scales.T, strict=True):
                total += product * scale
        return total * units

    def tiles(self) -> Iterator[tuple[slice, torch.Tensor]]:
        num_channels, width = self.shape
        for start in range(0, num_channels, TILE):
            channels = slice(start, min(start + TILE, num_channels))
            scales, zeros = scales_and_zeros(self._groups[channels])
            tile = (self._levels(channels, slice(None)) - zeros[..., None]) * scales[..., None]
            yield channels, tile.flatten(1)[:, :width]

    def _levels(self, channels: slice, groups: slice) -> torch.Tensor:
        """Return the levels of these channels and groups: [channels, groups, GROUP] fp32, from 0 to 15."""
        pairs = self._pairs.view(len(self._pairs), -1, GROUP // 2)[channels, groups]
        return torch.stack([pairs & 15, pairs >> 4], -1).flatten(2).float()


def _in_integers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (units, integers) like the kernel: x ~ units * integers, with integers in -8192 … 8192; fp32."""
    top = x.abs().amax(1, True) if x.numel() else torch.zeros(len(x), 1, dtype=torch.float32)
    finite = top < torch.inf
    units = top / 8192
    per_unit = torch.where(finite & (top > 0), 1 / units, 0.0)
    per_unit[per_unit == torch.inf] = 0  # rows of numbers below 2**-115 become zeros
    integers = torch.where(finite, x * per_unit, 0.0).round_()
    return torch.where(finite, units, torch.nan), integers


def fastest() -> type[Int4Weight]:
    """Return the fastest implementation on this machine."""
    return KernelInt4Weight if KernelInt4Weight.is_available() else PlainInt4Weight
