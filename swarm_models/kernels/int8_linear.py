"""Int8 weights on CPU: one byte per weight, fp32 in and out, fp32 accuracy except for the rounded weight.

There are three implementations of ``Int8Weight``. ``KernelWeight``, in ``kernel_weight.py``, is the fastest where the
kernel was compiled and the processor has instructions for byte products. ``FbgemmWeight`` comes next, but PyTorch has
announced that it will drop the quantised dtypes which fbgemm's operators need
(https://github.com/pytorch/pytorch/issues/184982). ``PlainWeight`` needs only plain int8 tensors.
"""

from __future__ import annotations

import functools
import warnings
from abc import abstractmethod
from collections.abc import Iterator

import torch

from swarm_models.kernels.quantized_linear import QuantizedWeight

TILE = 256  # rows of a weight, or of the input, expanded to fp32 at a time
TOP = 127  # the largest integer, and minus the smallest: the sum of two byte products must fit in 16 bits
TINY = 1e-30  # scale of output channels that are all zero

# Every tensor gets an explicit dtype: torch's default is process-wide, and differs while transformers loads a model.


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to symmetric int8 per output channel: ``weight ≈ q * scale[:, None]``, rounded to the nearest.

    weight: [out, in], any float dtype and strides -> q: [out, in] int8, scale: [out] fp32, on its device. Never holds
    more than ``TILE`` rows in fp32.
    """
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    scratch = scale.new_empty(min(TILE, len(weight)), weight.shape[1])  # allocated once
    for q_tile, scale_tile, tile in zip(q.split(TILE), scale.split(TILE), weight.split(TILE), strict=True):
        tile = tile.float()
        absmax = torch.maximum(tile.amax(1), tile.amin(1).neg_())
        # A tensor, because GPUs multiply by the reciprocal of a number, and all devices must round in the same way.
        torch.div(absmax, absmax.new_full((), TOP), out=scale_tile).clamp_(min=TINY)
        q_tile.copy_(torch.div(tile, scale_tile[:, None], out=scratch[: len(tile)]).round_())
    return q, scale


class Int8Weight(QuantizedWeight):
    """One frozen weight [out, in] in int8 with an fp32 scale per output channel, as ``quantize_rows`` returns it."""

    transpose_bytes: int = 0  # memory that ``keep_transpose`` takes; 0: gradients are fast without it

    def keep_transpose(self, wanted: bool) -> None:
        """Set whether ``matmul_grad`` keeps a copy of the weight, to be faster from its second call; thread-safe."""

    @abstractmethod
    def tiles(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield tile by tile (output channels, q: [tile, in] int8, scale: [tile] fp32)."""

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return ``(grad * scale) @ q``, [rows, in] fp32, computed tile by tile."""
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
    """A weight in fbgemm's packed int8 format, multiplied in two passes.

    Each row of the input is written with two digits to base 128, ``x = unit * (128 * hi + lo)``; the row's largest
    element sets its unit. Both digits go through one exact integer product, so activations keep 14 bits (outliers
    included) and no bit of a row's result depends on the other rows of the batch.
    """

    # digits -64 … 64 are passed as 0 … 128: fbgemm on AVX2 adds pairs of products in 16 bits, and 2 * 128 * 127 < 2**15
    ZERO_POINT, BASE = 64, 128
    # tensors, because torch takes microseconds to make a tensor of a number; powers of two, so products are exact
    PER_BASE, PER_LEVEL = torch.tensor([1 / 128, 1 / (64 * 128)], dtype=torch.float32)
    BLOCK = 512  # fbgemm pads in_features to a multiple of this on AVX2 (half of it on AVX-512)

    @classmethod
    @functools.cache
    def is_available(cls) -> bool:
        """Return whether torch has fbgemm on this machine, with the operators that are needed."""
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return False
        try:
            weight = cls(torch.tensor([[3, -2]], dtype=torch.int8), torch.tensor([0.5], dtype=torch.float32))
            product, unpacked = weight.matmul(torch.eye(2, dtype=torch.float32)), weight.dequantize()
        except (AttributeError, RuntimeError):  # a later torch may lack these operators
            return False
        return unpacked.tolist() == [[1.5, -1.0]] and torch.allclose(product, unpacked.T)

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.shape = q.shape
        channels, width = q.shape
        self.size_bytes, self.transpose_bytes = self._packed_bytes(channels, width), self._packed_bytes(width, channels)
        self._scale = scale
        self._keeps_transpose = False
        self._transpose: FbgemmWeight | None = None  # without the scales
        zero_points = torch.zeros(len(q), dtype=torch.long)
        engine = torch.backends.quantized.engine  # a setting of the process, by which torch chooses how to pack
        torch.backends.quantized.engine = "fbgemm"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor.* are deprecated", UserWarning)
                quantized = torch._make_per_channel_quantized_tensor(q, scale.double(), zero_points, 0)
            self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = engine

    def _packed_bytes(self, channels: int, width: int) -> int:
        """Return the size of the padded weight plus, per channel, two fp32 scales, an int32 zero point and sum."""
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
        # With a scale of 1 fbgemm takes the digits as integers. Rows without finite digits (zeros, NaN or inf) give a
        # finite product, and their unit, 0, NaN or inf, then sets the right result.
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        product = multiply(digits, 1.0, self.ZERO_POINT, self._packed)
        # 128 * hi is exact, so fusing, which depends on the position in the batch, does not change the result
        return torch.add(product[1], product[0], alpha=self.BASE).mul_(unit)

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Multiply by the kept transpose, like ``matmul``; without one, unpacking the weight takes most of the time."""
        if not self._keeps_transpose:
            return super().matmul_grad(grad)
        transpose = self._transpose
        if transpose is None:
            q = self._unpack().int_repr().T.contiguous()
            transpose = FbgemmWeight(q, torch.ones(len(q), dtype=torch.float32))
            self._transpose = transpose
            if not self._keeps_transpose:  # another thread has changed it
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
        """Return the quantised tensor [out, in]."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack(self._packed)[0]
        return weight


class PlainWeight(Int8Weight):
    """A weight as an int8 tensor and its scales.

    Few rows are multiplied in bf16 directly from int8, and are independent of each other bit for bit; more rows are
    multiplied with tiles of the weight expanded to fp32.
    """

    FEW_ROWS = 16  # up to here, not expanding the weight is faster
    ALIGNMENT = 32  # _weight_int8pack_mm reads whole vectors: with other widths it reads past the end of the weight

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.shape = q.shape
        self._q, self._scale = q, scale
        # the operator would round scales to bf16, so it gets ones, and fp32 scales are applied after it
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
    """Return the fastest implementation on this machine."""
    from swarm_models.kernels.kernel_weight import KernelWeight  # a late import: that module implements Int8Weight

    if KernelWeight.is_fastest():
        return KernelWeight
    return FbgemmWeight if FbgemmWeight.is_available() else PlainWeight
