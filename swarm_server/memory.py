"""Estimates of memory: what is free, what blocks and cached tokens take."""

from __future__ import annotations

import os

import torch

from swarm_protocol.checkpoint import Checkpoint
from swarm_server.blocks import BlockStack

_BYTES_PER_WEIGHT = {"int8": 1.1, "bnb-int8": 1.1, "nf4": 0.6, "none": 4.0}


def available_bytes(device: torch.device) -> int:
    """Memory of the device that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def hosted_bytes_per_block(checkpoint: Checkpoint, quant: str) -> int:
    """What the largest block takes once loaded with this quantisation."""
    num_blocks = checkpoint.family.num_blocks
    return int(max(map(checkpoint.block_parameters, range(num_blocks))) * _BYTES_PER_WEIGHT[quant])


def kv_bytes_per_token(stack: BlockStack) -> int:
    """Keys and values of one position in all blocks of the stack, found by caching one."""
    cache = stack.new_cache()
    with torch.inference_mode():
        hidden = torch.zeros(1, 1, stack.hidden_size, dtype=stack.dtype, device=stack.device)
        stack(hidden, None, torch.zeros(1, 1, dtype=torch.long, device=stack.device), cache)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
