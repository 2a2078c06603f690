"""Keys and values of sequences, in pages that rows share and never change: copy-on-write.

A *page* is memory for consecutive positions of some rows of one session, in every block of the session. It is as large
as the session's promise, so that usually one page holds a whole generation and attention reads it in place. A *row* is
one sequence: a list of the parts of pages that hold its positions. Rows are immutable values: reordering, cropping and
undoing a step copy references, not keys. Only a row that ends where its page is filled may continue in that page. Any
other row gets a new page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from swarm_models.kernels.attention import Numbers, channel_table
from swarm_models.kernels.int8_linear import TINY, TOP
from swarm_protocol.errors import PeerBusy
from swarm_protocol.failures import undone_on_error
from swarm_server.kv.kv_cache import Lease
from swarm_server.kv.row_states import COPIES, CPU, Slot

MAX_PARTS = 4  # parts of one row; with more, attention would read small pieces
FORK_TOKENS = 32  # room in a new page for a row that leaves a page in which another row continues
GROWTH_TOKENS = 64  # least room in a new page for a row whose page is full
_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class Channel:
    """A kind of data stored per position: keys, values or index keys of a block, or outputs of the last block.

    Attributes:
        dtype: the dtype in which the data is written and read.
        device: the device of the block.
        in_int8: whether the data is stored as int8, with an fp32 scale for each head of a position.
    """

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device = CPU
    in_int8: bool = False

    @property
    def token_bytes(self) -> int:
        return self.heads * self.stored_width * self.stored_dtype.itemsize

    @property
    def stored_width(self) -> int:
        return self.width + _SCALE_BYTES if self.in_int8 else self.width

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.uint8 if self.in_int8 else self.dtype

    def rounded(self, data: torch.Tensor) -> torch.Tensor:
        """Return data [..., width] as it is stored: [..., stored_width], int8 followed by the bytes of its scale."""
        if not self.in_int8:
            return data
        scale = (data.abs().amax(-1).float() / TOP).clamp_(min=TINY)[..., None]
        q = (data / scale).round_().to(torch.int8)
        return torch.cat([q.view(torch.uint8), scale.view(torch.uint8)], -1)

    def expanded(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored data, [..., stored_width], as it is read: [..., width], a new tensor unless it is the same."""
        if not self.in_int8:
            return stored
        q, scale = stored[..., : self.width].view(torch.int8), stored[..., self.width :]
        return (q * scale.clone(memory_format=torch.contiguous_format).view(torch.float32)).to(self.dtype)


@dataclass(frozen=True)
class KvGroup:
    """Channels that keep the same positions: all of them, or a window.

    Attributes:
        channels: the keys, values and index keys of some blocks; the outputs, if they are kept, come last.
        window: how many positions attention looks at; None for all.
    """

    channels: tuple[Channel, ...]
    window: int | None

    @property
    def token_bytes(self) -> int:
        return sum(channel.token_bytes for channel in self.channels)

    @property
    def most(self) -> int:
        """Return how many positions a row keeps, apart from a long step, until it is cut down to its window."""
        return sys.maxsize if self.window is None else 2 * self.window + 2 * GROWTH_TOKENS

    def room(self, num_tokens: int) -> int:
        """Return for how many positions a row of ``num_tokens`` takes room."""
        if self.window is None or num_tokens <= self.most:
            return num_tokens
        return 2 * self.most  # while positions are dropped, there are two pages

    def excess(self, length: int, num_kept: int, num_new: int, settled: int) -> int:
        """Return how many of the oldest positions to drop before ``num_new`` are added; 0 if none need to go yet.

        No later crop leaves the row fewer than ``settled`` positions.
        """
        if self.window is None or num_kept + num_new <= self.most:
            return 0
        return max(0, min(length, settled) - (self.window - 1) - (length - num_kept))


@dataclass(frozen=True)
class ChannelPlace:
    """The place of a block's keys and values: a group, and channels of this group.

    Attributes:
        index: the channel of the index's keys; None for blocks without an index.
    """

    group: int
    keys: int
    values: int
    index: int | None = None


@dataclass(frozen=True)
class PageLayout:
    """The layout of what a session over some blocks stores.

    Attributes:
        blocks: the place of each block, counted from the session's first; None for blocks without keys and values.
        outputs_group: the group whose last channel is the outputs, [1 head, hidden_size]; None if they are not kept.
        slots: the states of fixed size that each block stores besides.
    """

    groups: tuple[KvGroup, ...]
    blocks: tuple[ChannelPlace | None, ...]
    outputs_group: int | None = None
    slots: tuple[tuple[Slot, ...], ...] = ()

    def size_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a row of ``num_tokens`` positions takes."""
        positions = sum(group.token_bytes * group.room(num_tokens) for group in self.groups)
        return positions + COPIES * self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Return the bytes that a row's states take, whatever the row's length."""
        return sum(slot.size_bytes for slots in self.slots for slot in slots)

    @property
    def crops_states(self) -> bool:
        """Return whether all states belong to convolutions, whose states can be cropped."""
        return all(slot.is_convolution for slots in self.slots for slot in slots)


class Page:
    """Memory for ``capacity`` consecutive positions of ``num_rows`` rows.

    Attributes:
        channels: the channels of the group.
        data: the memory of each channel, [rows, heads, capacity, stored_width].
        filled: for each row, how many positions are taken.
        pinned: for each row, how many positions may not be filled again because the prefix cache refers to them.
        in_int8: whether some channels are stored in int8.
    """

    def __init__(self, group: KvGroup, num_rows: int, capacity: int, lease: Lease) -> None:
        """Allocate the page; raise PeerBusy if the lease finds no room."""
        self.lease = lease
        self.capacity = capacity
        self.channels = group.channels
        self.token_bytes = group.token_bytes  # of one row
        self.in_int8 = any(channel.in_int8 for channel in group.channels)
        self.filled = [0] * num_rows
        self.pinned = [0] * num_rows
        self._charge = lease.take(group.token_bytes * num_rows * capacity, self)
        self.data = [
            torch.empty(
                (num_rows, channel.heads, capacity, channel.stored_width),
                dtype=channel.stored_dtype,
                device=channel.device,
            )
            for channel in group.channels
        ]
        self._table: Numbers | None = None
        self._places: tuple[npt.NDArray[np.int64], ...] | None = None

    def addresses(self, row: int, position: int) -> npt.NDArray[np.int64]:
        """Return the address of a row's first head at ``position`` in each channel, [channels], int64."""
        if self._places is None:
            first = np.array([data.data_ptr() for data in self.data], dtype=np.int64)
            sizes = [(data.stride(0), data.stride(2), data.itemsize) for data in self.data]
            rows, positions, items = np.array(sizes, dtype=np.int64).T
            self._places = first, rows * items, positions * items
        first, rows, positions = self._places
        found: npt.NDArray[np.int64] = first + row * rows + position * positions
        return found

    @property
    def table(self) -> Numbers:
        """Return where the channels are, in the form that the attention kernel takes."""
        if self._table is None:
            self._table = channel_table(self.data)
        return self._table

    def trim(self) -> None:
        """Give back the room that is not filled. Nothing can be added to the page afterwards."""
        filled = max(self.filled)
        if filled < self.capacity:
            self._charge.shrink(self._charge.size_bytes * filled // self.capacity)
            self.data = [data[:, :, :filled].clone() for data in self.data]
            self.capacity = filled
            self._table = self._places = None


@dataclass(slots=True)  # and never changed: each step makes one, and ``frozen`` would take five times as long
class PageSlice:
    """The positions ``start`` … ``end`` of one row of a page."""

    page: Page
    row: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


Parts = tuple[PageSlice, ...]


def length_of(parts: Parts) -> int:
    """Return how many positions the parts have."""
    if len(parts) == 1:  # as nearly all rows have
        return parts[0].end - parts[0].start
    return sum([part.end - part.start for part in parts])


@dataclass(slots=True)  # and never changed, like PageSlice
class KvRow:
    """One sequence: for each group of the layout, the parts of pages that hold the kept positions."""

    length: int
    parts: tuple[Parts, ...]

    @classmethod
    def empty(cls, layout: PageLayout) -> KvRow:
        return cls(0, ((),) * len(layout.groups))

    def kept(self, group: int) -> int:
        return length_of(self.parts[group])

    def crop(self, length: int, layout: PageLayout) -> KvRow | None:
        """Return the first ``length`` positions; None if a window has dropped positions that the next one looks at."""
        for number, group in enumerate(layout.groups):
            first = self.length - self.kept(number)
            if group.window is not None and first > max(0, length - (group.window - 1)):
                return None
        return self.beginning(length)

    def beginning(self, length: int) -> KvRow:
        """Return the first ``length`` positions, as far as the groups have them."""
        removed = self.length - length
        left = (_take(parts, 0, max(0, length_of(parts) - removed)) for parts in self.parts)
        return replace(self, length=length, parts=tuple(left))

    @property
    def without_parts(self) -> KvRow:
        """Return a row of the same length none of whose positions is in memory."""
        return KvRow(self.length, ((),) * len(self.parts))

    def slice(self, start: int, end: int) -> tuple[Parts, ...] | None:
        """Return where positions ``start`` … ``end`` are in each group; None if a window has dropped some of them."""
        groups = range(len(self.parts))
        if any(start < self.length - self.kept(group) for group in groups):
            return None
        return tuple(self.slice_of(group, start, end) for group in groups)

    def slice_of(self, group: int, start: int, end: int) -> Parts:
        """Return where positions ``start`` … ``end`` are in one group, as far as the group still has them."""
        first = self.length - self.kept(group)
        return _take(self.parts[group], max(start, first) - first, max(end, first) - first)

    def extended(self, parts: tuple[Parts, ...], num_tokens: int) -> KvRow:
        """Return the row with ``num_tokens`` further positions, which are in ``parts``."""
        joined = tuple(_join(ours, more) for ours, more in zip(self.parts, parts, strict=True))
        return KvRow(self.length + num_tokens, joined)


def _take(parts: Parts, start: int, end: int) -> Parts:
    taken, position = [], 0
    for part in parts:
        first, last = max(start - position, 0), min(end - position, len(part))
        if first < last:
            taken.append(replace(part, start=part.start + first, end=part.start + last))
        position += len(part)
    return tuple(taken)


def _join(parts: Parts, more: Parts) -> Parts:
    joined = list(parts)
    for part in more:
        last = joined[-1] if joined else None
        if last is not None and (last.page, last.row, last.end) == (part.page, part.row, part.start):
            joined[-1] = replace(last, end=part.end)
        else:
            joined.append(part)
    return tuple(joined)


# ---------------------------------------------------------------- growing


@dataclass
class Growth:
    """Room for new positions of rows, taken before the positions are computed. ``undo`` gives the room back."""

    rows: tuple[KvRow, ...]
    _filled: list[tuple[Page, int, int]] = field(default_factory=list)  # page, row, and how much was filled before

    def undo(self) -> None:
        for page, row, filled in reversed(self._filled):
            page.filled[row] = filled

    def shorten(self, length: int) -> None:
        """Cut the grown rows to ``length`` positions, and leave the room behind them to later positions."""
        self.finish(row.beginning(length) for row in self.rows)
        ends = {(part.page, part.row): part.end for row in self.rows for part in chain.from_iterable(row.parts)}
        for page, row, filled in list(self._filled):
            self.fill(page, row, max(filled, page.pinned[row], ends.get((page, row), 0)))

    def finish(self, rows: Iterable[KvRow]) -> None:
        """Replace the rows by the grown ones."""
        self.rows = tuple(rows)

    def claim(self, page: Page, row: int, count: int) -> PageSlice:
        start = page.filled[row]
        self.fill(page, row, start + count)
        return PageSlice(page, row, start, start + count)

    def fill(self, page: Page, row: int, filled: int) -> None:
        self._filled.append((page, row, page.filled[row]))
        page.filled[row] = filled


def grow(
    before: tuple[KvRow, ...],
    rows: tuple[KvRow, ...],
    count: int,
    layout: PageLayout,
    lease: Lease,
    *,
    reserved: int = 0,
    settled: int | None = None,
    counts: Sequence[int] | None = None,
) -> Growth:
    """Return the rows of one session with room for ``count`` more positions each.

    Args:
        before: the session's rows until now; page room that only ``before`` uses is filled again.
        reserved: how many positions each row was promised; a first page has room for all of them.
        settled: the shortest length to which the rows may be cropped later; None if they are not cropped.
        counts: for how many of the last new positions each group gets room; None means all new positions.

    Raises:
        PeerBusy: there is no room; nothing has changed.
    """
    growth = Growth(rows)
    with undone_on_error(growth.undo):
        if rows is not before:
            for page, row, filled in _given_back(before, rows, lease):
                growth.fill(page, row, filled)
        columns = [
            _grow_group(growth, group, number, counts[number] if counts else count, lease, reserved, settled)
            for number, group in enumerate(layout.groups)
        ]
    growth.finish(KvRow(row.length + count, tuple(column[i] for column in columns)) for i, row in enumerate(rows))
    return growth


def grown_in_place(row: KvRow, count: int, layout: PageLayout, lease: Lease, growth: Growth) -> KvRow | None:
    """Return a row, grown where it ends; return None, and change nothing, if it has no room there."""
    grown: list[Parts] = []
    for group, parts in zip(layout.groups, row.parts, strict=True):
        if not parts or len(parts) > MAX_PARTS:
            return None
        last = parts[-1]
        page, end = last.page, last.end + count
        if page.lease is not lease or last.end != page.filled[last.row] or page.capacity < end:
            return None
        if group.window is not None and length_of(parts) + count > group.most:
            return None
        longer = PageSlice(page, last.row, last.start, end)
        grown.append((longer,) if len(parts) == 1 else (*parts[:-1], longer))
    for parts in grown:
        last = parts[-1]
        growth.fill(last.page, last.row, last.end)
    return KvRow(row.length + count, tuple(grown))


def _grow_group(
    growth: Growth,
    group: KvGroup,
    number: int,
    count: int,
    lease: Lease,
    reserved: int,
    settled: int | None,
) -> list[Parts]:
    """Return each row's parts of one group, with ``count`` positions added."""
    all_parts = [row.parts[number] for row in growth.rows]
    if not count:
        return all_parts
    length = growth.rows[0].length
    kept = length_of(all_parts[0])  # as of all rows, because rows of one session are equally long
    excess = group.excess(length, kept, count, length if settled is None else settled)
    if excess or max(map(len, all_parts)) > MAX_PARTS:
        all_parts = _compacted(growth, group, all_parts, excess, count, lease)
    grown, homeless = _grow_in_place(growth, all_parts, count, lease)
    for is_fork, indices in homeless.items():
        if indices:
            room = FORK_TOKENS if is_fork else _best_room(group, length_of(all_parts[0]), reserved)
            page = _page(group, len(indices), count, room, lease)
            for row, i in enumerate(indices):
                grown[i] = (*all_parts[i], growth.claim(page, row, count))
    return grown


def _grow_in_place(
    growth: Growth, all_parts: list[Parts], count: int, lease: Lease
) -> tuple[list[Parts], dict[bool, list[int]]]:
    """Grow the rows that have room behind their last part; return all rows' parts, and which rows need a new page.

    The rows under True are forks: other rows have filled the room behind their last part.
    """
    grown = list(all_parts)
    homeless: dict[bool, list[int]] = {False: [], True: []}
    for i, parts in enumerate(all_parts):
        own = parts[-1] if parts and parts[-1].page.lease is lease else None
        is_fork = own is not None and own.end < own.page.filled[own.row]
        if own is None or is_fork or own.page.capacity < own.end + count:
            homeless[is_fork].append(i)
        else:
            end = growth.claim(own.page, own.row, count).end
            grown[i] = (*parts[:-1], PageSlice(own.page, own.row, own.start, end))
    return grown, homeless


def _best_room(group: KvGroup, kept: int, reserved: int) -> int:
    """Return for how many positions a new page should have room, beside the ``kept`` ones."""
    # A quarter more each time: a row that outgrows its promise has few parts, and little room that it never uses.
    return max(min(reserved, group.most) - kept, max(GROWTH_TOKENS, kept // 4) if kept else 0)


def _page(group: KvGroup, num_rows: int, least: int, best: int, lease: Lease) -> Page:
    """Return a page for ``best`` positions, or half as many, and so on, for which there is room; at least ``least``."""
    room = max(best, least)
    while True:
        try:
            return Page(group, num_rows, room, lease)
        except PeerBusy:
            if room == least:
                raise
        room = max(room // 2, least)


def _compacted(
    growth: Growth,
    group: KvGroup,
    all_parts: list[Parts],
    excess: int,
    count: int,
    lease: Lease,
) -> list[Parts]:
    """Copy all rows' parts into one page, without the ``excess`` oldest positions; return the new parts."""
    kept = [_take(parts, excess, length_of(parts)) for parts in all_parts]
    length = length_of(kept[0])
    room = max(GROWTH_TOKENS, length // 4 if group.window is None else group.most - length)
    page = _page(group, len(kept), length + count, length + room, lease)
    compacted: list[Parts] = []
    for row, parts in enumerate(kept):
        position = 0
        for part in parts:
            for target, source in zip(page.data, part.page.data, strict=True):
                target[row, :, position : position + len(part)] = source[part.row, :, part.start : part.end]
            position += len(part)
        compacted.append((growth.claim(page, row, position),) if position else ())
    return compacted


def _given_back(before: Sequence[KvRow], after: Sequence[KvRow], lease: Lease) -> Iterator[tuple[Page, int, int]]:
    """Yield each page and row of the session whose end is no longer used, with how many positions stay filled."""
    ends = {
        (part.page, part.row): 0
        for row in before
        for part in chain.from_iterable(row.parts)
        if part.page.lease is lease
    }
    for row in after:
        for part in chain.from_iterable(row.parts):
            key = part.page, part.row
            if key in ends:
                ends[key] = max(ends[key], part.end)
    for (page, number), end in ends.items():
        filled = max(end, page.pinned[number])
        if filled < page.filled[number]:
            yield page, number, filled


# ---------------------------------------------------------------- where to read and write


class Run(NamedTuple):
    """Consecutive rows of a batch whose positions lie side by side in the same pages; one row, if they are in int8.

    Attributes:
        first: the first row of the batch.
        parts: the parts of the first row; the other rows are the next rows of the same pages.
        length: the total number of positions.
    """

    first: int
    num_rows: int
    parts: Parts
    length: int

    @property
    def rows(self) -> slice:
        """Return the rows of the batch."""
        return slice(self.first, self.first + self.num_rows)

    def read(self, channel: int) -> Iterator[torch.Tensor]:
        """Yield each part, [rows, heads, positions, width]: a view, or a copy if it is stored in another dtype."""
        for part in self.parts:
            stored = part.page.data[channel][part.row : part.row + self.num_rows, :, part.start : part.end]
            yield part.page.channels[channel].expanded(stored)

    def write(self, channel: int, new: torch.Tensor) -> None:
        """Store data of the last positions, which are in one part. new: [rows of the batch, heads, new, width]."""
        self.write_stored(channel, self.parts[-1].page.channels[channel].rounded(new[self.rows]))

    def write_stored(self, channel: int, stored: torch.Tensor) -> None:
        """Store data of the last positions as another page has stored it, [rows, heads, new, stored_width]."""
        page, row, end = self.parts[-1].page, self.parts[-1].row, self.parts[-1].end
        page.data[channel][row : row + self.num_rows, :, end - stored.shape[2] : end] = stored


def runs(rows: Sequence[KvRow], group: int, first: int) -> list[Run]:
    """Return where to read the rows of one session, which begin at row ``first`` of the batch."""
    result: list[Run] = []
    start = 0
    for end in range(1, len(rows) + 1):
        parts = rows[start].parts[group]
        if end == len(rows) or not _side_by_side(rows[end - 1].parts[group], rows[end].parts[group]):
            result.append(Run(first + start, end - start, parts, length_of(parts)))
            start = end
    return result


def _side_by_side(parts: Parts, others: Parts) -> bool:
    """Return whether two rows are read at once. In int8 they are not, so that one row at a time is expanded."""
    return len(parts) == len(others) and all(
        part.page is other.page
        and not part.page.in_int8
        and (part.row + 1, part.start, part.end) == (other.row, other.start, other.end)
        for part, other in zip(parts, others, strict=True)
    )
