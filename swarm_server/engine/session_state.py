"""A session in the engine: its rows, and how steps change them. Values: a step that fails changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.kv.kv_cache import Lease
from swarm_server.kv.kv_rows import PageLayout, Row
from swarm_server.kv.prefix_cache import ContentHash
from swarm_server.kv.row_states import RowStates


@dataclass(frozen=True)
class Reorder:
    """New row i is old row ``indices[i]``; the batch may grow or shrink."""

    indices: tuple[int, ...]


@dataclass(frozen=True)
class Crop:
    """Keeps the first ``length`` positions."""

    length: int


@dataclass(frozen=True)
class RecordPast:
    """Sliding windows keep what a later crop may need: what came after the crop before it."""


HistoryChange = Reorder | Crop | RecordPast


@dataclass(frozen=True)
class SessionStep:
    """New positions of one session.

    Attributes:
        start: positions before them; what the session has beyond is dropped.
        inputs: hidden states and what attention needs to know, for the new positions.
        changes: what happens to the session before.
        num_wanted: how many of the last outputs will be used; None: all.
        every_block: the outputs of every block are wanted, not only of the last.
        num_following: positions per row that come in the steps after this one, if it is a chunk of a prompt.
    """

    start: int
    inputs: BlockInput
    changes: tuple[HistoryChange, ...] = ()
    num_wanted: int | None = None
    every_block: bool = False
    num_following: int = 0


@dataclass(frozen=True)
class State:
    """What steps change in a session.

    Attributes:
        settled: windows keep what a crop to this length needs; None: nothing beyond the window.
        hashes: of each row's content so far; None if it is not known any more.
        digests: of each row's full pages of content.
        mask: under which that was sent, [batch, positions]; None if nothing was hidden.
        can_match: all content so far was found in the prefix cache.
        states: what blocks remember besides; None before the first position, or if it is not known.
        unhashed: the last steps, whose content is not in ``hashes`` yet, since no page has become full by them.
    """

    rows: tuple[Row, ...]
    settled: int | None = None
    hashes: tuple[ContentHash, ...] | None = None
    digests: tuple[tuple[bytes, ...], ...] = ()
    mask: torch.Tensor | None = None
    can_match: bool = True
    states: RowStates | None = None
    unhashed: tuple[SessionStep, ...] = ()

    @property
    def length(self) -> int:
        return self.rows[0].length


@dataclass
class Session:
    """One generation on this server.

    Attributes:
        reserved: positions per row that were promised to it.
        adapter: of all its rows.
    """

    blocks: Span
    layout: PageLayout
    lease: Lease = field(repr=False)
    reserved: int
    state: State = field(repr=False)
    adapter: PlacedAdapter | None = field(default=None, repr=False)

    @property
    def batch_size(self) -> int:
        return len(self.state.rows)

    @property
    def length(self) -> int:
        """Positions of every row."""
        return self.state.length

    @property
    def used_bytes(self) -> int:
        """What takes the positions that there are. From any thread."""
        rows = self.state.rows  # read once: the compute thread may be changing them
        return len(rows) * self.layout.size_bytes(rows[0].length) if rows else 0

    @property
    def keeps_outputs(self) -> bool:
        return self.layout.outputs_group is not None


def changed(state: State, change: HistoryChange, layout: PageLayout) -> State:
    """Raises RequestRejected if the change cannot be made."""
    if isinstance(change, RecordPast):
        return replace(state, settled=state.length)
    if isinstance(change, Reorder):
        highest = max(change.indices)
        if highest >= len(state.rows):
            raise RequestRejected(f"reordering takes row {highest} of a session that has {len(state.rows)} rows")
        picked: dict[str, Any] = {"rows": tuple(state.rows[i] for i in change.indices)}
        if state.hashes is not None:
            assert not state.unhashed, "the rows' content is to be hashed before they are reordered"
            picked["hashes"] = tuple(state.hashes[i] for i in change.indices)
            picked["digests"] = tuple(state.digests[i] for i in change.indices)
            picked["mask"] = None if state.mask is None else state.mask[list(change.indices)]
        if state.states is not None:
            picked["states"] = state.states.picked(change.indices)
        return replace(state, **picked)
    state = cropped(state, change.length, layout)
    return state if state.settled is None else replace(state, settled=change.length)


def cropped(state: State, length: int, layout: PageLayout) -> State:
    if length > state.length:
        raise RequestRejected(f"a step begins at position {length}, but the session has {state.length}")
    if length == state.length:
        return state
    rows = tuple(row for row in (row.crop(length, layout) for row in state.rows) if row is not None)
    if len(rows) < len(state.rows):
        raise RequestRejected(f"{state.length} positions cannot be cropped to {length}: sliding windows have moved on")
    if state.states is not None:
        state = replace(state, states=state.states.cropped(length, layout.slots) if length else None)
    # The hash of part of a page cannot be taken back: from here on, content is not known any more.
    return forgotten(replace(state, rows=rows))


def forgotten(state: State) -> State:
    """Without the knowledge of its content: nothing more of it is shared."""
    return replace(state, hashes=None, digests=(), mask=None, can_match=False, unhashed=())
