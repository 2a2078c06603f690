"""Products of few rows with an int8 weight on a GPU, in Triton: each weight is read once, as one byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MIN_SIDE = 16  # of the matrices that tl.dot multiplies
_WIDTH = 128  # that is multiplied at a time
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def few_rows_product(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x @ (q * scale[:, None]).T`` with sums in fp32.

    Args:
        x: [rows, in], fp32 or 16 bits, on the current GPU.
        q: [out, in] int8, contiguous; scale: [out] fp32.

    Returns:
        [rows, out] of x's dtype.
    """
    (num_rows, width), num_channels = x.shape, len(q)
    output = x.new_empty(num_rows, num_channels)
    channels = 16 if num_channels < 4096 else 32  # few, so that there is work for all of a GPU
    _multiply[(-(-num_channels // channels),)](
        x.contiguous(),
        q,
        scale,
        output,
        num_rows,
        width,
        num_channels,
        max(_MIN_SIDE, 1 << (num_rows - 1).bit_length()),
        channels,
        _WIDTH,
        _TYPES[x.dtype],
    )
    return output


@triton.jit
def _multiply(
    x,
    q,
    scale,
    output,
    num_rows,
    width,
    num_channels,
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    rows, channels = tl.arange(0, SIDE), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first_of_channel = channels.to(tl.int64) * width
    total = tl.zeros([SIDE, CHANNELS], tl.float32)
    for first in range(0, width, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        left = tl.load(
            x + rows[:, None] * width + columns[None, :], (rows < num_rows)[:, None] & (columns < width)[None, :], 0
        )
        right = tl.load(
            q + first_of_channel[None, :] + columns[:, None],
            (channels < num_channels)[None, :] & (columns < width)[:, None],
            0,
        )
        total += tl.dot(left, right.to(TYPE), input_precision="ieee")
    total *= tl.load(scale + channels, channels < num_channels, 0)[None, :]
    tl.store(
        output + rows[:, None] * num_channels + channels[None, :],
        total.to(TYPE),
        (rows < num_rows)[:, None] & (channels < num_channels)[None, :],
    )
