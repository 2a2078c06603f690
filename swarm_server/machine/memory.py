"""Estimates of memory: what is free, what blocks and cached tokens take."""

from __future__ import annotations

import os

import torch

from swarm_protocol.checkpoints.checkpoint import Checkpoint
from swarm_server.machine.eight_bits import eight_bit_layers

_BYTES_PER_WEIGHT = {"int8": 1.1, "bnb-int8": 1.1, "int4": 0.62, "nf4": 0.6, "none": 4.0}


def available_bytes(device: torch.device) -> int:
    """Memory of the device that is free now."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for new tensors
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def hosted_bytes_per_block(checkpoint: Checkpoint, quant: str) -> int:
    """What the largest block takes once loaded with this quantisation."""
    family, weight_bytes = checkpoint.family, _BYTES_PER_WEIGHT[quant]
    sizes = [weight_bytes * checkpoint.block_parameters(index) for index in range(family.num_blocks)]
    if quant == "int4":
        more_bytes = _BYTES_PER_WEIGHT["int8"] - weight_bytes
        for index, names in enumerate(eight_bit_layers(family)):
            sizes[index] += more_bytes * sum(size for name, size in family.linears[index] if name in names)
    return int(max(sizes))
