"""Triton kernel for products of few rows with an int8 weight: each weight is read once, as one byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MIN_SIDE = 16  # the smallest side of the matrices that tl.dot multiplies
# Chosen from 36 settings on an H100, for 1 and 16 rows, at the shapes of an 8 B model: the fastest, or within 2 % of
# it, with the stages of ``_num_stages``. They are 1.1 to 1.9 times as fast as 128 columns in 3 stages.
CHANNELS, WIDTH, _FEW_STAGES, _MOST_STAGES = 32, 256, 3, 5
_MOST_COLUMN_BYTES = 128  # bytes of x per column, for that width
_SHARED_BYTES = 48 << 10  # per program, if the device's limit is not known
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def few_rows_product(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x @ (q * scale[:, None]).T`` with sums in fp32.

    Args:
        x: [rows, in], fp32 or 16 bits, on the current GPU.
        q: [out, in] int8, contiguous; scale: [out] fp32.

    Returns:
        [rows, out] of x's dtype.
    """
    (num_rows, width), num_channels = x.shape, len(q)
    output = x.new_empty(num_rows, num_channels)
    side = max(_MIN_SIDE, 1 << (num_rows - 1).bit_length())
    column_bytes = side * x.itemsize
    at_once = WIDTH if column_bytes <= _MOST_COLUMN_BYTES else WIDTH // 2
    programs = -(-num_channels // CHANNELS)
    _multiply[(programs,)](
        x.contiguous(),
        q,
        scale,
        output,
        num_rows,
        width,
        num_channels,
        side,
        CHANNELS,
        at_once,
        _TYPES[x.dtype],
        num_stages=_num_stages(at_once * (column_bytes + CHANNELS), programs, x.device),
    )
    return output


def _num_stages(stage_bytes: int, programs: int, device: torch.device) -> int:
    """Return the number of loads in flight at once.

    Use as many stages as fit beside the one that is being multiplied. Use few if more stages would reduce the number of
    programs that run at the same time.
    """
    shared_bytes, at_once = _SHARED_BYTES, 1
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", _SHARED_BYTES)
        at_once = -(-programs // properties.multi_processor_count)
    wanted = max(_FEW_STAGES, min(_MOST_STAGES, shared_bytes // (stage_bytes * at_once)))
    return max(1, min(wanted, shared_bytes // stage_bytes - 1))


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
    # A program computes all rows of CHANNELS channels. SIDE: num_rows, rounded up to what tl.dot takes.
    rows, channels = tl.arange(0, SIDE), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first_of_channel = channels.to(tl.int64) * width  # large weights have more than 2**31 elements
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
        total += tl.dot(left, right.to(TYPE), input_precision="ieee")  # otherwise fp32 is rounded to TF32
    total *= tl.load(scale + channels, channels < num_channels, 0)[None, :]
    tl.store(
        output + rows[:, None] * num_channels + channels[None, :],
        total.to(TYPE),
        (rows < num_rows)[:, None] & (channels < num_channels)[None, :],
    )
