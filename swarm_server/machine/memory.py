"""Estimates of memory: how much is free, and how much blocks take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.quantization.eight_bits import eight_bit_layers
from swarm_protocol import system

_SCORES_SHARE = 0.2  # of the free memory that the scores of an index may take
_SCORE_BYTES = 2 * 4  # a float32 in two copies
_BYTES_PER_WEIGHT = {"int8": 1.1, "fp8": 1.1, "bnb-int8": 1.1, "int4": 0.62, "nf4": 0.6, "none": 4.0}


def available_bytes(device: torch.device) -> int:
    """Return the bytes of the device's memory that are free now."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept by torch for new tensors
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type == "xpu":  # not all drivers say what other processes use
        total_bytes: int = torch.xpu.get_device_properties(device).total_memory
        return total_bytes - torch.xpu.memory_allocated(device)
    if device.type == "mps":  # its memory is the machine's
        left_bytes = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return min(left_bytes, system.available_bytes())
    return system.available_bytes()


def hosted_bytes(checkpoint: ModelCheckpoint, quant: str) -> list[int]:
    """Return the bytes that each block of the model takes once it is loaded with this quantisation."""
    family, weight_bytes = checkpoint.family, _BYTES_PER_WEIGHT[quant]
    sizes = [weight_bytes * checkpoint.block_parameters(index) for index in range(family.num_blocks)]
    if quant == "int4":
        more_bytes = _BYTES_PER_WEIGHT["int8"] - weight_bytes
        for index, names in enumerate(eight_bit_layers(family)):
            sizes[index] += more_bytes * sum(size for name, size in family.linears[index] if name in names)
    return list(map(int, sizes))


def tokens_with_scores(free_bytes: float, num_heads: int, num_positions: int) -> int:
    """Return how many tokens an index can score at a time against ``num_positions`` keys, with ``num_heads`` heads.

    Each block scores all pairs of a token and a key before it chooses. A fifth of the free memory is for the scores.
    """
    return max(1, int(_SCORES_SHARE * free_bytes / (_SCORE_BYTES * num_heads * num_positions)))


def num_that_fit(sizes_bytes: Sequence[int], free_bytes: float) -> int:
    """Return how many consecutive blocks fit, whichever block is the first."""
    ends = list(accumulate(sizes_bytes, initial=0))
    for count in range(len(sizes_bytes), 0, -1):
        if max(end - start for start, end in zip(ends, ends[count:], strict=False)) <= free_bytes:
            return count
    return 0
