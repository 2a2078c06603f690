"""Keys and values of a session's positions as bytes, to be stored by a session on another server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm_protocol.errors import RequestRejected
from swarm_server.kv_rows import Layout, Row, runs


@dataclass(frozen=True)
class Stored:
    """What a session keeps of ``num_tokens`` successive positions.

    Attributes:
        num_kept: for each group of the layout, how many of the last of these positions it has (see ``Group.window``).
        data: bytes; for each group all its channels, [batch, heads, num_kept, width].
    """

    num_tokens: int
    num_kept: tuple[int, ...]
    data: torch.Tensor

    def require_fit(self, layout: Layout, batch_size: int) -> None:
        """Raises RequestRejected unless this is what a session of this layout keeps."""
        if len(self.num_kept) != len(layout.groups) or any(
            count > self.num_tokens or (group.window is None and count < self.num_tokens)
            for count, group in zip(self.num_kept, layout.groups, strict=False)
        ):
            raise RequestRejected(
                f"{self.num_tokens} positions come with the keys of {list(self.num_kept)}: these blocks keep others"
            )
        kept = zip(self.num_kept, layout.groups, strict=True)
        expected = batch_size * sum(count * group.token_bytes for count, group in kept)
        if self.data.numel() != expected:
            raise RequestRejected(
                f"keys and values of {self.num_tokens} positions take {self.data.numel()} bytes: expected {expected}; "
                "the servers store them differently"
            )


def read(rows: Sequence[Row], group: int, start: int, end: int, channel: int) -> torch.Tensor:
    """One channel of those of positions ``start`` … ``end`` that the group has, [rows, heads, positions, width]."""
    result = []
    for row in rows:
        parts = row.slice_of(group, start, end)
        result.append(torch.cat([part.page.data[channel][part.row, :, part.start : part.end] for part in parts], 1))
    return torch.stack(result)


def pack(rows: Sequence[Row], layout: Layout, start: int, end: int) -> Stored:
    """What the rows of one session keep of these positions."""
    num_kept, data = [], []
    for number, group in enumerate(layout.groups):
        count = sum(map(len, rows[0].slice_of(number, start, end)))
        num_kept.append(count)
        for channel in range(len(group.channels) if count else 0):
            data.append(read(rows, number, start, end, channel).contiguous().view(torch.uint8).flatten().cpu())
    return Stored(end - start, tuple(num_kept), torch.cat(data) if data else torch.empty(0, dtype=torch.uint8))


def unpack(stored: Stored, rows: Sequence[Row], layout: Layout) -> None:
    """Writes to the last positions of the rows, for which there is room."""
    offset = 0
    for number, (group, count) in enumerate(zip(layout.groups, stored.num_kept, strict=True)):
        if not count:
            continue
        places = runs(rows, number, 0)
        for index, channel in enumerate(group.channels):
            size_bytes = len(rows) * count * channel.token_bytes
            data = stored.data[offset : offset + size_bytes].clone().view(channel.dtype)  # aligned
            data = data.view(len(rows), channel.heads, count, channel.width)
            offset += size_bytes
            for run in places:
                page, page_rows, positions = run.parts[-1]
                page.data[index][page_rows, :, positions.stop - count : positions.stop] = data[run.rows]
