"""bfloat16, and blocks of int8."""

from __future__ import annotations

import math

import torch

from swarm_protocol.codecs.sizes import INT8_BLOCK


def pack_bf16(tensor: torch.Tensor) -> bytes:
    """Each element rounded to the nearest."""
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def unpack_bf16(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return within_range(torch.frombuffer(data, dtype=torch.bfloat16).view(shape), dtype)


def pack_int8(tensor: torch.Tensor) -> bytes:
    """The blocks' maxima, then their elements; a block with an element that is not finite has none that is, decoded."""
    flat = tensor.reshape(-1).float()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK)
    absmax = padded.abs().amax(1)
    quantized = (padded * (127 / absmax.clamp(min=1e-30))[:, None]).round_().to(torch.int8)
    return absmax.numpy().tobytes() + quantized.numpy().tobytes()


def unpack_int8(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of as many bytes as the shape takes."""
    num_blocks = len(data) // (INT8_BLOCK + 4)
    absmax = torch.frombuffer(data, dtype=torch.float32, count=num_blocks)
    quantized = torch.frombuffer(data, dtype=torch.int8, offset=4 * num_blocks).view(num_blocks, INT8_BLOCK)
    return (quantized * (absmax / 127)[:, None]).view(-1)[: math.prod(shape)].view(shape).to(dtype)


def within_range(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another dtype: what is finite stays so, though rounding may have carried it beyond the range of float16."""
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        tensor = torch.where(tensor.isfinite(), tensor.float().clamp(-most, most), tensor.float())
    return tensor.to(dtype)
