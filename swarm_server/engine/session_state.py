"""State of a session in the engine, and how steps change it. It is immutable: a step that fails changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.failures import undone_on_error
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.kv.kv_cache import Lease
from swarm_server.kv.kv_rows import KvRow, PageLayout
from swarm_server.kv.prefix_cache import ContentHash
from swarm_server.kv.row_states import RowStates


@dataclass(frozen=True)
class Reorder:
    """A new order of the rows: new row i is old row ``indices[i]``. The batch may grow or shrink."""

    indices: tuple[int, ...]


@dataclass(frozen=True)
class Crop:
    """A cut of the session to its first ``length`` positions."""

    length: int


@dataclass(frozen=True)
class RecordPast:
    """A request that sliding windows keep what later crops need: all positions from now, or from the last crop, on."""


HistoryChange = Reorder | Crop | RecordPast


@dataclass(frozen=True)
class SessionStep:
    """New positions of one session.

    Attributes:
        start: the number of positions before the new ones; the session drops all positions beyond ``start``.
        inputs: the hidden states of the new positions, with the mask and position ids that attention needs.
        changes: changes of the session's history that are made before the step.
        num_wanted: how many of the last outputs the caller uses; None means all.
        every_block: whether the outputs of every block are wanted, not only the last block's.
        num_following: the number of positions per row in later steps, if this step is a chunk of a prompt.
    """

    start: int
    inputs: BlockInput
    changes: tuple[HistoryChange, ...] = ()
    num_wanted: int | None = None
    every_block: bool = False
    num_following: int = 0


@dataclass(slots=True)  # and never changed, like PageSlice
class KvState:
    """The part of a session that steps change.

    Attributes:
        settled: sliding windows keep the positions that a crop to this length needs; None if they keep only the window.
        hashes: the content hash of each row so far; None if the content is no longer known.
        digests: the digests of each row's full pages of content.
        mask: the attention mask of the hashed content, [batch, positions]; None if it hides nothing.
        can_match: whether all content so far was found in the prefix cache.
        states: the recurrent and convolution states; None before the first position, or if they are not known.
        unhashed: the last steps, whose content is not in ``hashes`` yet because they have not filled a page. A step of
            one position of text may be replaced by its content.
    """

    rows: tuple[KvRow, ...]
    settled: int | None = None
    hashes: tuple[ContentHash, ...] | None = None
    digests: tuple[tuple[bytes, ...], ...] = ()
    mask: torch.Tensor | None = None
    can_match: bool = True
    states: RowStates | None = None
    unhashed: tuple[SessionStep | bytes, ...] = ()

    @property
    def length(self) -> int:
        return self.rows[0].length

    def followed_by(self, row: KvRow, unhashed: tuple[SessionStep | bytes, ...]) -> KvState:
        """Return the state of a session of one row after the row's next position."""
        can_match = self.can_match and not unhashed
        return KvState((row,), self.settled, self.hashes, self.digests, self.mask, can_match, self.states, unhashed)


@dataclass
class Session:
    """One generation on this server.

    Attributes:
        reserved: the number of positions per row that the server has promised.
        adapter: the adapter that applies to all rows.
        is_parked: whether the positions are outside the cache, so that nothing can be computed or read.
    """

    blocks: Span
    layout: PageLayout
    lease: Lease = field(repr=False)
    reserved: int
    state: KvState = field(repr=False)
    adapter: PlacedAdapter | None = field(default=None, repr=False)
    is_parked: bool = False

    @property
    def batch_size(self) -> int:
        return len(self.state.rows)

    @property
    def length(self) -> int:
        """Return the number of positions, which is the same for every row."""
        return self.state.length

    @property
    def used_bytes(self) -> int:
        """Return the bytes that the current positions take in the cache. Any thread may read this property."""
        rows = self.state.rows  # read once, because the compute thread may replace them
        return len(rows) * self.layout.size_bytes(rows[0].length) if rows and not self.is_parked else 0

    @property
    def keeps_outputs(self) -> bool:
        return self.layout.outputs_group is not None

    def enter(self, state: KvState) -> None:
        """Replace the state, once whatever leads to it has been computed."""
        self.state = state

    def leave(self, state: KvState) -> None:
        """Replace the state, once its positions have left the cache; ``come_back`` ends that."""
        self.state, self.is_parked = state, True

    def come_back(self, state: KvState) -> None:
        """Replace the state, once its positions are in the cache again, or are given up."""
        self.state, self.is_parked = state, False

    def require_present(self) -> None:
        """Raise RequestRejected if the session is closed. The caller makes sure that it is not parked."""
        if not self.state.rows:
            raise RequestRejected("the session is closed")
        assert not self.is_parked, "the session is parked"

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Return to the present state if the context ends with an error."""
        before = self.state
        with undone_on_error(lambda: self.enter(before)):
            yield

    def forget_promise(self) -> None:
        """Make the next step reserve its room itself, because the promise was taken back."""
        self.reserved = self.length if self.batch_size else 0


@dataclass(frozen=True)
class NextPositions:
    """The next position of text of each of several sessions.

    Attributes:
        sessions: sessions of one row each.
        starts: the number of positions before the new one, for each session.
        hidden: [sessions, 1, hidden_size].
    """

    sessions: Sequence[Session]
    starts: Sequence[int]
    hidden: torch.Tensor

    def __len__(self) -> int:
        return len(self.sessions)

    @classmethod
    def of(cls, session: Session, step: SessionStep) -> NextPositions | None:
        """Return a step as the next position of its session; None if the step is, or says, more than that."""
        inputs = step.inputs
        if step.changes or step.every_block or not inputs.is_plain or inputs.hidden.shape[:2] != (1, 1):
            return None
        return cls([session], [step.start], inputs.hidden)

    @property
    def inputs(self) -> BlockInput:
        return BlockInput(self.hidden)

    def step(self, number: int) -> SessionStep:
        """Return the step of one session."""
        return SessionStep(self.starts[number], BlockInput(self.hidden[number : number + 1]))

    def part(self, numbers: Sequence[int]) -> NextPositions:
        """Return the positions of some of the sessions."""
        sessions, starts = [self.sessions[i] for i in numbers], [self.starts[i] for i in numbers]
        return NextPositions(sessions, starts, self.hidden[list(numbers)])


BatchEntry = tuple[Session, SessionStep] | NextPositions  # what the engine computes in a batch with others
Outcome = torch.Tensor | Exception  # the outputs of some sessions, or the error that refuses their steps
Results = Outcome | list[Outcome]  # of an entry: for all its sessions, or for each of them


def changed(state: KvState, change: HistoryChange, layout: PageLayout) -> KvState:
    """Return ``state`` after ``change``; raise RequestRejected if the change is impossible."""
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


def cropped(state: KvState, length: int, layout: PageLayout) -> KvState:
    """Return ``state`` cut to its first ``length`` positions; raise RequestRejected if that is impossible."""
    if length > state.length:
        raise RequestRejected(f"a step begins at position {length}, but the session has {state.length}")
    if length == state.length:
        return state
    rows = tuple(row for row in (row.crop(length, layout) for row in state.rows) if row is not None)
    if len(rows) < len(state.rows):
        raise RequestRejected(f"{state.length} positions cannot be cropped to {length}: sliding windows have moved on")
    if state.states is not None:
        state = replace(state, states=state.states.cropped(length, layout.slots) if length else None)
    # The hash of a partial page cannot be undone: from here on, the content is not known.
    return forgotten(replace(state, rows=rows))


def forgotten(state: KvState) -> KvState:
    """Return ``state`` without its content hashes, so that none of its further pages are shared."""
    return replace(state, hashes=None, digests=(), mask=None, can_match=False, unhashed=())
