"""What the GPU's attention kernels must give. As a script: for every shape, on the CPU."""

from __future__ import annotations

import itertools

import torch

from swarm_server.gpu.row_tables import CAPACITY, FIELDS, KEYS, LENGTH, PARTS, VALUES
from tests.unit.server.gpu.stand_ins import attended

PLACES = ((7, 3), (64, 64), (200, 131), (40, 1))  # capacity and positions of the parts of a row
ROWS = (1, 0, 4, 2, 3)  # so many parts each
SHAPES = ((8, 2, 64, 64), (3, 3, 20, 36), (4, 1, 8, 8))  # heads, key-value heads, widths of keys and values
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Pages:
    """Keys and values of some rows, in memory of NaN where nothing is kept."""

    def __init__(self, kv_heads: int, width: int, value_width: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.table = torch.zeros(len(ROWS), PARTS, FIELDS, dtype=torch.long)
        self.kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # last part first, [kv_heads, positions, width]
        self._alive = []
        for row, num_parts in enumerate(ROWS):
            self.kept.append([])
            for number, (capacity, length) in enumerate(PLACES[:num_parts]):
                pages = [
                    torch.full((2, kv_heads, capacity, size), float("nan"), dtype=dtype, device=device)
                    for size in (width, value_width)
                ]
                start = min(2, capacity - length)
                for page in pages:
                    page[1, :, start : start + length] = torch.randn_like(page[1, :, start : start + length])
                part = self.table[row, number]
                part[KEYS], part[VALUES] = (page[1, :, start:].data_ptr() for page in pages)
                part[CAPACITY], part[LENGTH] = capacity, length
                self.kept[-1].append((pages[0][1, :, start : start + length], pages[1][1, :, start : start + length]))
                self._alive += pages


def check(
    attention: object, heads: int, kv_heads: int, width: int, value_width: int, dtype: torch.dtype, device: str
) -> None:
    pages = Pages(kv_heads, width, value_width, dtype, device)
    table = pages.table.to(device)
    new = [torch.randn(len(ROWS), kv_heads, 1, size, device=device).to(dtype) for size in (width, value_width)]
    attention.store(table, *new)
    for row, parts in enumerate(pages.kept):
        for kept, tensor in zip(parts[0] if parts else (), new, strict=False):
            assert torch.equal(kept[:, -1], tensor[row, :, 0])
    query = torch.randn(len(ROWS), heads, 1, width, device=device).to(dtype)
    output = attention.attend(table, query, kv_heads, value_width, 0.3)
    assert output.shape == (len(ROWS), 1, heads, value_width) and output.dtype == dtype
    for row, parts in enumerate(pages.kept):
        expected = torch.zeros(heads, value_width, device=device)
        if parts:
            keys, values = (torch.cat([part[i] for part in parts], 1).float() for i in range(2))
            queries = query[row].float().view(kv_heads, -1, width)
            expected = (torch.softmax(queries @ keys.mT * 0.3, -1) @ values).view(heads, value_width)
        error = (output[row, 0].float() - expected).abs().max()
        assert error <= TOLERANCES[dtype], error
    if device == "cpu" and dtype == torch.float32:
        assert (output - attended(table, query, kv_heads, value_width, 0.3)).abs().max() <= 1e-5


if __name__ == "__main__":
    from swarm_server.gpu.triton_attention import TritonAttention

    for shape, kind in itertools.product(SHAPES, (torch.float32, torch.float16)):
        torch.manual_seed(0)
        check(TritonAttention(), *shape, kind, "cpu")
