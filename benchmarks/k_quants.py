"""The values of weights in the types of GGUF that the package gguf reads but does not write: K-quants and IQ4.

A group of 16 or 32 weights has a scale, and in some types a minimum. Most types store these as integers, in units that
each 256 weights share. As in llama.cpp, a group has the scale of several candidates that makes the weighted squared
error least. Types: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

import math
from functools import partial

import torch
from gguf.quants import IQ4_NL

SHARED = 256  # weights, of a row, whose groups have their scales in the same unit


def in_units(numbers: torch.Tensor, group: int, lowest: int, highest: int) -> torch.Tensor:
    """Round the [groups, 1] numbers to integers from ``lowest`` to ``highest``, times a unit in fp16."""
    sharing = numbers.view(-1, SHARED // group)
    extreme = sharing.gather(1, sharing.abs().argmax(1, keepdim=True))
    unit = (extreme / (lowest or highest)).half().float()
    return (unit * (sharing / unit).nan_to_num().round().clamp(lowest, highest)).view(-1, 1)


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return levels[torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)]


def with_scale(weight: torch.Tensor, levels: torch.Tensor, group: int, scales: int | None) -> torch.Tensor:
    """Round to ``scale * level``; scales are integers from ``-scales`` in shared units, or in fp16."""
    x = weight.reshape(-1, group)
    importance = x.square()
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))
    scale, least = torch.zeros_like(extreme), torch.full_like(extreme, math.inf)
    for step in range(-9, 10):
        q = nearest(x / (extreme / levels[0] * (1 + step / 50)), levels)
        fitted = (importance * x * q).sum(1, keepdim=True) / (importance * q.square()).sum(1, keepdim=True)
        error = (importance * (x - fitted * q).square()).sum(1, keepdim=True)
        scale, least = torch.where(error < least, fitted, scale), torch.where(error < least, error, least)
    scale = scale.half().float() if scales is None else in_units(scale, group, -scales, scales - 1)
    return (scale * nearest(x / scale, levels)).view(weight.shape)


def with_minimum(weight: torch.Tensor, top: int, group: int, scales: int) -> torch.Tensor:
    """Round to ``scale * q - minimum``, q being at most ``top``; both are integers up to ``scales`` in shared units."""
    x = weight.reshape(-1, group)
    low = x.amin(1, keepdim=True).clamp(max=0)
    span = x.amax(1, keepdim=True) - low
    importance = x.abs() + x.square().mean(1, keepdim=True).sqrt()
    total, sum_x = importance.sum(1, keepdim=True), (importance * x).sum(1, keepdim=True)
    scale, minimum, least = torch.zeros_like(low), -low, torch.full_like(low, math.inf)
    for step in range(21):
        q = ((x - low) * (top - 1 + step / 10) / span).round().clamp(0, top)
        sum_q, sum_qq = (importance * q).sum(1, keepdim=True), (importance * q.square()).sum(1, keepdim=True)
        sum_xq = (importance * x * q).sum(1, keepdim=True)
        offset = (sum_qq * sum_x - sum_q * sum_xq) / (total * sum_qq - sum_q.square())
        offset = offset.clamp(max=0)
        fitted = (sum_xq - offset * sum_q) / sum_qq
        error = (importance * (x - fitted * q - offset).square()).sum(1, keepdim=True)
        is_better = error < least
        scale, minimum = torch.where(is_better, fitted, scale), torch.where(is_better, -offset, minimum)
        least = torch.where(is_better, error, least)
    scale, minimum = in_units(scale, group, 0, scales), in_units(minimum, group, 0, scales)
    q = ((x + minimum) / scale).nan_to_num().round().clamp(0, top)
    return (scale * q - minimum).view(weight.shape)


IQ4_LEVELS = torch.tensor(IQ4_NL.kvalues, dtype=torch.float32)
ROUND = {
    "Q2_K": partial(with_minimum, top=3, group=16, scales=15),
    "Q3_K": partial(with_scale, levels=torch.arange(-4.0, 4.0), group=16, scales=32),
    "Q4_K": partial(with_minimum, top=15, group=32, scales=63),
    "Q5_K": partial(with_minimum, top=31, group=32, scales=63),
    "Q6_K": partial(with_scale, levels=torch.arange(-32.0, 32.0), group=16, scales=128),
    "IQ4_NL": partial(with_scale, levels=IQ4_LEVELS, group=32, scales=None),
    "IQ4_XS": partial(with_scale, levels=IQ4_LEVELS, group=32, scales=32),
}
# The types that llama.cpp takes for matrices whose rows are no multiples of ``SHARED``.
OTHERWISE = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
