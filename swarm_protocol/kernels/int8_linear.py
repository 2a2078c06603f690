"""int8 linear on CPU: one byte per weight in memory, fp32 in and out, fp32 accuracy but for the rounded weight.

Three implementations of ``Int8Weight`` stand behind ``Int8Linear``. ``KernelWeight``, of ``swarm_protocol/kernels``, is
the fastest where it was compiled and the processor has instructions for products of bytes. ``FbgemmWeight`` comes next,
but PyTorch has announced that it will drop the quantised dtypes which fbgemm's operators need
(https://github.com/pytorch/pytorch/issues/184982); ``PlainWeight`` needs only plain int8 tensors.
"""

from __future__ import annotations

import functools
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, TypeVar

import torch

from swarm_protocol.kernels.quantized_linear import QuantizedLinear, QuantizedWeight

L = TypeVar("L", bound="Int8Linear")

TILE = 256  # rows of a weight, or of the input, that are expanded to fp32 at a time
TOP = 127  # the largest integer, and minus the smallest: products of two pairs of bytes must fit in 16 bits
TINY = 1e-30  # scale of output channels of zeros

# Tensors are made with their dtype: torch's default is process-wide, and another one while transformers loads a model.


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per output channel: ``weight ≈ q * scale[:, None]``, rounding to the nearest.

    weight: [out, in], any float dtype and strides -> q: [out, in] int8, scale: [out] fp32, on its device. Never holds
    more than ``TILE`` rows in fp32.
    """
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    scratch = scale.new_empty(min(TILE, len(weight)), weight.shape[1])  # made once
    for q_tile, scale_tile, tile in zip(q.split(TILE), scale.split(TILE), weight.split(TILE), strict=True):
        tile = tile.float()
        absmax = torch.maximum(tile.amax(1), tile.amin(1).neg_())
        # A tensor, since GPUs multiply by the reciprocal of a number: all devices are to round alike.
        torch.div(absmax, absmax.new_full((), TOP), out=scale_tile).clamp_(min=TINY)
        q_tile.copy_(torch.div(tile, scale_tile[:, None], out=scratch[: len(tile)]).round_())
    return q, scale


def joined(tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What rounding gives for a whole weight, from what it gave for tiles of its rows."""
    first, second = zip(*tiles, strict=True)
    return torch.cat(first), torch.cat(second)


class Int8Weight(QuantizedWeight):
    """One frozen weight [out, in] in int8 with an fp32 scale per output channel."""

    transpose_bytes: int = 0  # that ``keep_transpose`` takes; 0: gradients are fast without

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether this torch, on this machine, can run it."""

    @abstractmethod
    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        """q: [out, in] int8, scale: [out] fp32."""

    @classmethod
    def from_tiles(cls, shape: Sequence[int], tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Self:
        """From the results of ``quantize_rows`` for tiles of a weight of this shape, whole strips of 64 rows each."""
        return cls(*joined(tiles))

    def keep_transpose(self, wanted: bool) -> None:
        """Whether ``matmul_grad`` keeps a copy of the weight, to be faster from the second time on. From any thread."""

    @abstractmethod
    def tiles(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """(output channels, q: [tile, in] int8, scale: [tile] fp32), tile by tile."""

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """``(grad * scale) @ q``, tile by tile."""
        total = torch.zeros(len(grad), self.shape[1], dtype=torch.float32)
        for channels, q, scale in self.tiles():
            total.addmm_(grad[:, channels] * scale, q.float())
        return total

    def dequantize(self) -> torch.Tensor:
        weight = torch.empty(self.shape, dtype=torch.float32)
        for channels, q, scale in self.tiles():
            torch.mul(q, scale[:, None], out=weight[channels])
        return weight


class FbgemmWeight(Int8Weight):
    """fbgemm's packed int8 weight, multiplied in two passes.

    Each row of the input is written with two digits to base 128, ``x = unit * (128 * hi + lo)``, in a unit of its own
    that its largest element sets. Both digits go through one exact integer product, so activations keep 14 bits
    (outliers included) and a row's result does not depend, in any bit, on the other rows of the batch.
    """

    # digits -64 … 64 are passed as 0 … 128: fbgemm on AVX2 adds pairs of products in 16 bits, and 2 * 128 * 127 < 2**15
    ZERO_POINT, BASE = 64, 128
    # tensors, because torch takes microseconds to make one of a number; powers of two, so multiplying by them is exact
    PER_BASE, PER_LEVEL = torch.tensor([1 / 128, 1 / (64 * 128)], dtype=torch.float32)
    BLOCK = 512  # fbgemm pads in_features to a multiple of this on AVX2 (half of it on AVX-512)

    @classmethod
    @functools.cache
    def is_available(cls) -> bool:
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return False
        try:
            weight = cls(torch.tensor([[3, -2]], dtype=torch.int8), torch.tensor([0.5]))
            product, unpacked = weight.matmul(torch.eye(2)), weight.dequantize()
        except (AttributeError, RuntimeError):  # how a later torch may say that these operators are gone
            return False
        return torch.equal(unpacked, torch.tensor([[1.5, -1.0]])) and torch.allclose(product, unpacked.T)

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.shape = q.shape
        channels, width = q.shape
        self.size_bytes, self.transpose_bytes = self._packed_bytes(channels, width), self._packed_bytes(width, channels)
        self._scale = scale
        self._keeps_transpose = False
        self._transpose: FbgemmWeight | None = None  # without the scales
        zero_points = torch.zeros(len(q), dtype=torch.long)
        engine = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor.* are deprecated", UserWarning)
                quantized = torch._make_per_channel_quantized_tensor(q, scale.double(), zero_points, 0)
            self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = engine

    def _packed_bytes(self, channels: int, width: int) -> int:
        """Packed weight, padded; per channel two fp32 scales, an int32 zero point and an int32 sum."""
        return channels * (-(-width // self.BLOCK) * self.BLOCK + 16)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > TILE:
            return torch.cat([self.matmul(tile) for tile in x.split(TILE)])
        digits = torch.empty(2, *x.shape, dtype=torch.float32)
        hi, lo = digits[0], digits[1]
        unit = torch.abs(x, out=hi).amax(1, True).mul_(self.PER_LEVEL)  # vector_norm takes 20 × as long
        torch.div(x, unit, out=lo).round_()
        torch.mul(lo, self.PER_BASE, out=hi).round_()
        lo.sub_(hi, alpha=self.BASE)
        # With a scale of 1 fbgemm takes the digits as the integers they are. Rows without finite digits, of zeros or
        # with NaN or inf, give something finite, which their unit, 0, NaN or inf, then makes what it should be.
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        product = multiply(digits, 1.0, self.ZERO_POINT, self._packed)
        # 128 * hi is exact, so it does not matter whether this is fused, which varies with the position in the batch
        return torch.add(product[1], product[0], alpha=self.BASE).mul_(unit)

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """A transpose makes it a product like the other; without, unpacking the weight takes the most time."""
        if not self._keeps_transpose:
            return super().matmul_grad(grad)
        transpose = self._transpose
        if transpose is None:
            q = self._unpack().int_repr().T.contiguous()
            transpose = FbgemmWeight(q, torch.ones(len(q), dtype=torch.float32))
            self._transpose = transpose
            if not self._keeps_transpose:  # any more
                self._transpose = None
        return transpose.matmul(grad * self._scale)

    def keep_transpose(self, wanted: bool) -> None:
        self._keeps_transpose = wanted
        if not wanted:
            self._transpose = None

    def tiles(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        quantized = self._unpack()  # one int8 copy, freed with the iterator
        for start in range(0, len(self._scale), TILE):
            channels = slice(start, start + TILE)
            yield channels, quantized[channels].int_repr(), self._scale[channels]

    def _unpack(self) -> torch.Tensor:
        """Quantised tensor [out, in]."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack(self._packed)[0]
        return weight


class PlainWeight(Int8Weight):
    """An int8 tensor and its scales.

    Few rows are multiplied in bf16 straight from int8, and are independent of each other bit for bit; more rows by
    expanding tiles of the weight to fp32.
    """

    FEW_ROWS = 16  # where expanding the weight becomes faster
    ALIGNMENT = 32  # _weight_int8pack_mm reads whole vectors: with other widths it reads past the end of the weight

    @classmethod
    def is_available(cls) -> bool:
        return True

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.shape = q.shape
        self._q, self._scale = q, scale
        # scales would be rounded to bf16: the operator gets ones, fp32 scales follow
        self._ones = torch.ones(len(q), dtype=torch.bfloat16)
        self.size_bytes = q.nbytes + scale.nbytes + self._ones.nbytes
        self._has_few_rows_kernel = hasattr(torch, "_weight_int8pack_mm") and q.shape[1] % self.ALIGNMENT == 0

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        if self._has_few_rows_kernel and 0 < len(x) <= self.FEW_ROWS:
            return torch._weight_int8pack_mm(x.bfloat16(), self._q, self._ones).float().mul_(self._scale)
        product = torch.empty(len(x), self.shape[0], dtype=torch.float32)
        for channels, q, scale in self.tiles():
            torch.mul(x @ q.float().T, scale, out=product[:, channels])
        return product

    def tiles(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        for start in range(0, len(self._q), TILE):
            channels = slice(start, start + TILE)
            yield channels, self._q[channels], self._scale[channels]


def fastest() -> type[Int8Weight]:
    """The implementation that multiplies fastest on this machine."""
    from swarm_protocol.kernels.kernel_weight import KernelWeight  # which implements what stands above

    if KernelWeight.is_fastest():
        return KernelWeight
    return FbgemmWeight if FbgemmWeight.is_available() else PlainWeight


class Int8Linear(QuantizedLinear):
    """A frozen linear layer over an ``Int8Weight``."""

    quantized: Int8Weight

    @property
    def int8(self) -> Int8Weight:
        return self.quantized

    @classmethod
    def from_float(
        cls: type[L],
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        implementation: type[Int8Weight] | None = None,
    ) -> L:
        """Quantises weight [out, in]; ``implementation`` is the fastest that runs here unless given."""
        return cls.from_int8(*quantize_rows(weight.detach()), bias, implementation)

    @classmethod
    def from_int8(
        cls: type[L],
        q: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        implementation: type[Int8Weight] | None = None,
    ) -> L:
        """From the result of ``quantize_rows``."""
        return cls((implementation or fastest())(q, scale), bias)
