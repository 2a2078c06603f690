"""Rows of keys and values as tests lay them out, write them and read them back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm_server.kv.kv_rows import Channel, ChannelPlace, KvGroup, KvRow, PageLayout, runs

WINDOW = 3
KEYS, VALUES = Channel(2, 1, torch.float64), Channel(1, 3, torch.float64)
FULL, SLIDING = KvGroup((KEYS, VALUES), None), KvGroup((VALUES, KEYS), WINDOW)
LAYOUTS = {
    "full": PageLayout((FULL,), (ChannelPlace(0, 0, 1),)),
    "mixed": PageLayout((FULL, SLIDING), (ChannelPlace(0, 0, 1), ChannelPlace(1, 0, 1))),
    "sliding": PageLayout((SLIDING,), (ChannelPlace(0, 0, 1),)),
}


def write(rows: Sequence[KvRow], layout: PageLayout, values: torch.Tensor) -> None:
    """values: [rows, new] for the last positions of each row, into all channels."""
    for number, group in enumerate(layout.groups):
        for run in runs(rows, number, 0):
            for channel, kind in enumerate(group.channels):
                run.write(channel, values[:, None, :, None].expand(-1, kind.heads, -1, kind.width))


def read(rows: Sequence[KvRow], layout: PageLayout) -> list[list[list[float]]]:
    """For each group the positions that each row keeps; all channels must agree."""
    result = []
    for number, group in enumerate(layout.groups):
        kept: list[list[float]] = [[] for _ in rows]
        for run in runs(rows, number, 0) if rows[0].length else []:
            content = [torch.cat(list(run.read(channel)), 2) for channel in range(len(group.channels))]
            assert all(part.shape[2] == run.length for part in content)
            values = content[0][:, 0, :, 0]
            assert all(bool((part == values[:, None, :, None]).all()) for part in content)
            kept[run.rows] = values.tolist()
        result.append(kept)
    return result
