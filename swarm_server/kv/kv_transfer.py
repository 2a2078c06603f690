"""Keys and values of positions as bytes, for transfer to another server, or out of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch

from swarm_protocol.errors import RequestRejected
from swarm_server.kv.kv_rows import KvRow, PageLayout, Parts, runs
from swarm_server.kv.row_states import States


@dataclass(frozen=True)
class Stored:
    """The data that a session keeps of ``num_tokens`` successive positions.

    Attributes:
        num_kept: for each group of the layout, how many of the last positions the group has (see ``KvGroup.window``).
        data: bytes; for each group all its channels, [batch, heads, num_kept, stored_width]; then the states of the
            blocks, if these positions are the session's last.
    """

    num_tokens: int
    num_kept: tuple[int, ...]
    data: torch.Tensor

    def require_fit(self, layout: PageLayout, batch_size: int) -> None:
        """Raise RequestRejected unless this is the data that a session of this layout keeps."""
        if len(self.num_kept) != len(layout.groups) or any(
            count > self.num_tokens or (group.window is None and count < self.num_tokens)
            for count, group in zip(self.num_kept, layout.groups, strict=False)
        ):
            raise RequestRejected(
                f"{self.num_tokens} positions come with the keys of {list(self.num_kept)}: these blocks keep others"
            )
        expected = self._kept_bytes(layout, batch_size)
        if self.data.numel() != expected and not self.has_states(layout, batch_size):
            raise RequestRejected(
                f"keys and values of {self.num_tokens} positions take {self.data.numel()} bytes: expected {expected}; "
                "the servers store them differently"
            )

    def has_states(self, layout: PageLayout, batch_size: int) -> bool:
        """Return whether the states of the blocks come with the keys and values."""
        states_bytes = batch_size * layout.state_bytes
        return states_bytes > 0 and self.data.numel() == self._kept_bytes(layout, batch_size) + states_bytes

    def _kept_bytes(self, layout: PageLayout, batch_size: int) -> int:
        kept = zip(self.num_kept, layout.groups, strict=True)
        return batch_size * sum(count * group.token_bytes for count, group in kept)


def read(rows: Sequence[KvRow], group: int, start: int, end: int, channel: int) -> torch.Tensor:
    """Return what one channel stores of positions ``start`` … ``end``: [rows, heads, positions kept, stored_width]."""
    return torch.stack([_joined(row.slice_of(group, start, end), channel) for row in rows])


def _joined(parts: Parts, channel: int) -> torch.Tensor:
    """Return what one channel stores of these parts of one row, [heads, positions, stored_width]."""
    return torch.cat([part.page.data[channel][part.row, :, part.start : part.end] for part in parts], 1)


def pack(rows: Sequence[KvRow], layout: PageLayout, start: int, end: int, states: States = ()) -> Stored:
    """Return what the rows of one session keep of these positions. ``states``: the states after them, if known."""
    num_kept, data = [], []
    for number, group in enumerate(layout.groups):
        count = sum(map(len, rows[0].slice_of(number, start, end)))
        num_kept.append(count)
        for channel in range(len(group.channels) if count else 0):
            data.append(read(rows, number, start, end, channel))
    for slots, of_block in zip(layout.slots, states, strict=False):
        for slot, tensor in zip(slots, of_block, strict=True):
            data.append(tensor[..., -slot.shape[-1] :])  # without the further inputs that a convolution has recorded
    return Stored(end - start, tuple(num_kept), as_bytes(data))


def size_of(parts: Sequence[Parts]) -> int:
    """Return how many bytes ``pack_parts`` returns."""
    return sum(len(part) * part.page.token_bytes for part in chain.from_iterable(parts))


def pack_parts(parts: Sequence[Parts]) -> torch.Tensor:
    """Return what these parts of one row store, [bytes] uint8: for each group all its channels."""
    data = [
        _joined(of_group, channel)
        for of_group in parts
        if of_group
        for channel in range(len(of_group[0].page.channels))
    ]
    return as_bytes(data)


def unpack(stored: Stored, rows: Sequence[KvRow], layout: PageLayout) -> States | None:
    """Write to the last positions of the rows, which have room. Return the states after these positions, if stored."""
    tensors = TensorReader(stored.data)
    for number, (group, count) in enumerate(zip(layout.groups, stored.num_kept, strict=True)):
        if not count:
            continue
        places = runs(rows, number, 0)
        for index, channel in enumerate(group.channels):
            data = tensors.next((len(rows), channel.heads, count, channel.stored_width), channel.stored_dtype)
            for run in places:
                run.write_stored(index, data[run.rows])
    if not stored.has_states(layout, len(rows)):
        return None
    return tuple(
        tuple(tensors.next((len(rows), *slot.shape), slot.dtype).to(slot.device) for slot in slots)
        for slots in layout.slots
    )


class TensorReader:
    """A reader of the tensors whose bytes ``as_bytes`` has returned."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._offset = 0

    def next(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of the next tensor, on the CPU."""
        size, start = torch.Size(shape), self._offset
        self._offset += size.numel() * dtype.itemsize
        return self._data[start : self._offset].clone().view(dtype).view(size)  # cloned to be aligned


def as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of all tensors, one after the other, [bytes] uint8 on the CPU."""
    data = [tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors]
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    # One copy for each change of device: many small ones are slow.
    copies = [torch.cat(list(of_device)).cpu() for _, of_device in groupby(data, lambda part: part.device)]
    return copies[0] if len(copies) == 1 else torch.cat(copies)
