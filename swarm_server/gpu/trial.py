"""A trial of attention kernels on this GPU, because the batches of a server's start are too short to show errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swarm_server.gpu.row_tables import CAPACITY, FIELDS, KEYS, LENGTH, PARTS, VALUES

if TYPE_CHECKING:
    from swarm_server.gpu.triton_attention import TritonAttention

_HEADS, _KV_HEADS, _WIDTH = 6, 2, 64
_PARTS = ((8, 3), (2600, 2500))  # capacity and positions of each part; the last part first
_TOLERANCE = 2e-2  # relative, for sums that are rounded to bfloat16


def attention_is_right(attention: TritonAttention, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel stores a position, and attends to it and 2502 others in two pages, as torch does."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    pages = [[random(1, _KV_HEADS, capacity, _WIDTH) for _ in (KEYS, VALUES)] for capacity, _ in _PARTS]
    table = torch.zeros(1, PARTS, FIELDS, dtype=torch.long)
    for part, (keys, values), (capacity, length) in zip(table[0], pages, _PARTS, strict=False):
        part[KEYS], part[VALUES], part[CAPACITY], part[LENGTH] = keys.data_ptr(), values.data_ptr(), capacity, length
    table = table.to(device)
    new = [random(1, _KV_HEADS, 1, _WIDTH) for _ in (KEYS, VALUES)]
    attention.store(table, *new)
    if not all(
        torch.equal(page[:, :, _PARTS[0][1] - 1], tensor[:, :, 0]) for page, tensor in zip(pages[0], new, strict=True)
    ):
        return False
    query = random(1, _HEADS, 1, _WIDTH)
    output = attention.attend(table, query, _KV_HEADS, _WIDTH, _WIDTH**-0.5)
    keys, values = (
        torch.cat([part[i][:, :, :length] for part, (_, length) in zip(pages, _PARTS, strict=True)], 2).float()
        for i in (KEYS, VALUES)
    )
    scores = query.float().view(1, _KV_HEADS, -1, _WIDTH) @ keys.mT * _WIDTH**-0.5
    expected = (torch.softmax(scores, -1) @ values).view(1, 1, _HEADS, _WIDTH)
    return bool((output.float() - expected).abs().max() <= _TOLERANCE * expected.abs().max())
