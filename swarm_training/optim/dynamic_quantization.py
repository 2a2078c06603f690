"""Dynamic 8-bit quantisation, in blocks with one maximum each (Dettmers et al., 2022, section 2).

A byte selects one of 256 values between −1 and 1, or 0 and 1: seven decades, the largest with the most values
(dynamic tree quantisation, Dettmers, 2016). The values are those of bitsandbytes. Its code is not used because peers
must have the same bits on any processor, and on CPUs bitsandbytes does not always choose the nearest value.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK_SIZE = 256
_DECADES = 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0


@functools.cache
def code_values(signed: bool) -> Tensor:
    """Return the 256 values, [256] float32, ascending: 0, 1, and in each decade twice as many as in the one below."""
    positive = [
        decade * (0.1 + 0.9 * (number + 0.5) / count)
        for exponent, decade in enumerate(_DECADES)
        for count in [2**exponent if signed else 2 ** (exponent + 1)]
        for number in range(count)
    ]
    negative = [-value for value in positive] if signed else []
    return torch.tensor(sorted([*negative, 0.0, *positive, 1.0]))


@functools.cache
def _borders(signed: bool) -> Tensor:
    values = code_values(signed)
    return (values[1:] + values[:-1]) / 2


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of a float32 tensor (uint8, its shape) and the maxima of its blocks ([blocks] float32).

    Unsigned numbers other than 0 do not become 0: a second moment of 0 below a mean that is not 0 would cause an
    unbounded step.
    """
    blocks = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    maxima = blocks.abs().amax(1)
    relative = blocks / torch.where(maxima == 0, 1.0, maxima)[:, None]
    codes = torch.bucketize(relative, _borders(signed), out_int32=True)
    if not signed:
        codes = codes.clamp_(min=0).maximum((relative > 0).to(torch.int32))
    return codes.clamp_(max=255).to(torch.uint8).view(-1)[: x.numel()].view(x.shape), maxima


def dequantize(codes: Tensor, maxima: Tensor, signed: bool) -> Tensor:
    """Return float32 numbers in the codes' shape; a block whose maximum is not finite has no finite element."""
    values = code_values(signed)[codes.reshape(-1).int()]
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    return (blocks * maxima[:, None]).view(-1)[: codes.numel()].view(codes.shape)
