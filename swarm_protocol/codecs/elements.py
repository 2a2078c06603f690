"""The bfloat16 codec, and the codec for blocks of int8."""

from __future__ import annotations

import math

import torch

from swarm_protocol.codecs.sizes import INT8_BLOCK


def pack_bf16(tensor: torch.Tensor) -> bytes:
    """Encode each element, rounded to the nearest bfloat16."""
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def unpack_bf16(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return within_range(torch.frombuffer(data, dtype=torch.bfloat16).view(shape), dtype)


def pack_int8(tensor: torch.Tensor) -> bytes:
    """Encode the blocks' maxima, then the elements; a non-finite element makes its whole block decode as non-finite."""
    flat = tensor.reshape(-1).float()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK)  # [blocks, INT8_BLOCK]
    absmax = padded.abs().amax(1)  # infinite or NaN if an element is, and so is what the receiver computes with it
    quantized = (padded * (127 / absmax.clamp(min=1e-30))[:, None]).round_().to(torch.int8)  # zeros: no division by 0
    return absmax.numpy().tobytes() + quantized.numpy().tobytes()


def unpack_int8(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Decode ``data``, whose length must match the shape."""
    num_blocks = len(data) // (INT8_BLOCK + 4)  # 4: the maximum, in float32
    absmax = torch.frombuffer(data, dtype=torch.float32, count=num_blocks)
    quantized = torch.frombuffer(data, dtype=torch.int8, offset=4 * num_blocks).view(num_blocks, INT8_BLOCK)
    return (quantized * (absmax / 127)[:, None]).view(-1)[: math.prod(shape)].view(shape).to(dtype)


def within_range(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to another dtype; finite values stay finite, even where rounding exceeded the range of float16."""
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        tensor = torch.where(tensor.isfinite(), tensor.float().clamp(-most, most), tensor.float())
    return tensor.to(dtype)
