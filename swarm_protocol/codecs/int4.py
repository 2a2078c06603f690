"""A codec for rows of hidden states, with 4.5 bits per element.

A few channels of language models are tens of times larger than all others (Dettmers et al., "LLM.int8()", 2022). Inside
a block, one of them would leave no precision for the rest. Therefore the largest elements of a row, one per 128, are
stored separately. The rest is cut into blocks of 64 that share a scale; the largest element is ±7.5 steps. A row's
bytes depend only on the row. ``benchmarks/README.md`` compares this with a Hadamard rotation and with other sizes and
levels.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from swarm_protocol.codecs.elements import within_range
from swarm_protocol.codecs.sizes import INT4_BLOCK, num_outliers

_TINY = 1e-30  # in place of the step of a block of zeros
_MIDDLE = 7.5  # halfway between the levels 0 to 15


def pack_int4(tensor: torch.Tensor) -> bytes:
    """Encode scales, then outlier indices, outlier values, and elements; scales and values are bfloat16.

    A non-finite element makes its whole block decode as non-finite; a non-finite outlier affects only itself.
    """
    rows = tensor.reshape(-1, _width(tensor.shape)).float()
    num_rows, width = rows.shape
    num_blocks, outliers = -(-width // INT4_BLOCK), num_outliers(width)
    # Sorted, because the order of topk is not specified, and equal rows get equal bytes.
    indices = rows.abs().topk(outliers, sorted=False).indices.sort().values
    values = rows.gather(1, indices)
    padded = rows.new_zeros(num_rows, num_blocks * INT4_BLOCK)
    padded[:, :width] = rows
    padded.scatter_(1, indices, 0.0)
    blocks = padded.view(-1, INT4_BLOCK)
    scales = (blocks.abs().amax(1) / _MIDDLE).bfloat16()
    steps = scales.float().clamp_(min=_TINY)
    if not bool(steps.isfinite().all()):  # the scale alone makes such a block non-finite; NaN has no uint8
        blocks.nan_to_num_(0.0, 0.0, 0.0)
    # x / step is in -7.5 … 7.5. Truncating x / step + 8 picks the nearest of the levels, which decode to level - 7.5.
    levels = blocks.div_(steps[:, None]).add_(8.0).clamp_(0.0, 15.0).to(torch.uint8)
    low, high = levels.chunk(2, dim=1)
    nibbles = (high << 4).bitwise_or_(low)
    parts = [scales.view(torch.int16), indices.to(torch.int32), values.bfloat16().view(torch.int16), nibbles]
    scale_bits, index_numbers, value_bits, packed = (part.numpy() for part in parts)
    return b"".join(
        part.tobytes() for part in (scale_bits, index_numbers.astype(np.uint16, copy=False), value_bits, packed)
    )


def unpack_int4(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Decode ``data``, whose length must match the shape; its content may be arbitrary."""
    width = _width(shape)
    num_rows, num_blocks, outliers = math.prod(shape) // width, -(-width // INT4_BLOCK), num_outliers(width)
    raw = np.frombuffer(data, np.uint8)
    # Two bytes for each scale, outlier index and outlier value; the elements follow.
    ends = np.cumsum([2 * num_rows * num_blocks, 2 * num_rows * outliers, 2 * num_rows * outliers])
    scale_bits, index_numbers, value_bits, packed = np.split(raw, ends)
    scales = torch.from_numpy(scale_bits.view(np.int16)).view(torch.bfloat16).float()
    nibbles = torch.from_numpy(packed).view(-1, INT4_BLOCK // 2)
    blocks = torch.empty(num_rows * num_blocks, INT4_BLOCK)
    blocks[:, : INT4_BLOCK // 2] = nibbles & 15
    blocks[:, INT4_BLOCK // 2 :] = nibbles >> 4
    rows = blocks.sub_(_MIDDLE).mul_(scales[:, None]).view(num_rows, -1)
    if outliers:
        # An untrusted sender may have written indices beyond the row.
        indices = torch.from_numpy(index_numbers.view(np.uint16).astype(np.int64)).clamp_(max=width - 1)
        values = torch.from_numpy(value_bits.view(np.int16)).view(torch.bfloat16).float()
        rows.scatter_(1, indices.view(num_rows, -1), values.view(num_rows, -1))
    return within_range(rows[:, :width].reshape(shape), dtype)


def _width(shape: tuple[int, ...]) -> int:
    """Return the width of a row; a scalar counts as 1."""
    return shape[-1] if len(shape) else 1
