"""Parking of an idle session: its keys and values leave the cache, and come back before its next step."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import torch

from swarm_protocol.errors import PeerBusy
from swarm_protocol.failures import undone_on_error
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.admission.preemption import Claim
from swarm_server.engine.session_state import KvState, Session
from swarm_server.kv.kv_cache import NoRoom
from swarm_server.kv.kv_rows import KvRow, grow
from swarm_server.kv.kv_transfer import Stored, TensorReader, as_bytes, pack, unpack
from swarm_server.kv.offload import KvOffload
from swarm_server.kv.row_states import RowStates, RowStatesRoom
from swarm_server.sessions.services import SpanServices

T = TypeVar("T")
_PIECES_AT_ONCE = 8  # packed or unpacked between two steps of other sessions


@dataclass(frozen=True)
class _Piece:
    """Up to one page of positions of one row, outside the cache.

    Attributes:
        key: the digest of the content if it is known, else a random key.
        is_shared: whether the key is a digest, under which other sessions may find the content.
        num_kept: for each group of the layout, how many of these positions the row has.
    """

    row: int
    start: int
    end: int
    key: bytes
    is_shared: bool
    num_kept: tuple[int, ...]


class Parking:
    """The way of one session out of the cache and back. While it is parked, nothing of it can be computed or read."""

    def __init__(self, services: SpanServices, session: Session, claim: Claim) -> None:
        self._services = services
        self._session = session
        self._claim = claim
        self._busy = asyncio.Lock()  # held while the session leaves the cache or comes back
        self._pieces: list[_Piece] = []
        self._num_shared = 0  # pages at the start of each row whose digests are known
        self._states: list[_ParkedStates] = []  # those after the last step, then those before it, as far as known
        self._held: list[tuple[bytes, bool]] = []  # keys outside the cache, and whether other sessions may use them
        self._closed = False

    @property
    def is_possible(self) -> bool:
        """Return whether there is room for the session outside the cache, and its rows share no memory.

        Rows that share memory would need more room when they come back.
        """
        session = self._session
        size_bytes = session.batch_size * session.layout.size_bytes(session.length)
        num_pieces = session.batch_size * -(-session.length // PAGE_TOKENS)
        is_there = not session.is_parked and session.length > 0
        return is_there and self._offload.can_hold(size_bytes, num_pieces) and not _share_memory(session.state.rows)

    async def park(self, is_idle: Callable[[], bool]) -> bool:
        """Take the session out of the cache; return whether it has left. The caller makes sure that no step begins.

        ``is_idle`` returns False as soon as somebody wants the session.
        """
        async with self._busy:
            session = self._session
            if not self.is_possible:
                return False
            try:
                if await self._store(is_idle):
                    await self._call(partial(self._services.engine.park, session))
                    self._services.counters.parked["parked"] += 1
            finally:
                if self._closed or not session.is_parked:
                    self._release()
            return session.is_parked

    async def resume(self) -> None:
        """Bring the session back into the cache, if it is parked.

        Raises:
            NoRoom: there is no room; or the keys and values are lost, and the session is preempted.
        """
        async with self._busy:
            session = self._session
            if not session.is_parked:  # the session never left, or is back already
                self._release()
                self._claim.returned()
                return
            self._claim.heard()
            session.lease.promise(session.batch_size * session.layout.size_bytes(session.length))
            try:
                with undone_on_error(session.lease.release_unused):
                    await self._return()
            finally:
                if self._closed or not session.is_parked:
                    self._release()
            self._claim.returned()
            self._services.counters.parked["resumed"] += 1

    def close(self) -> None:
        """Give up what is outside the cache, because the session has ended. It may still be leaving or returning."""
        self._closed = True
        if not self._busy.locked():  # else it is given up when the session has left or returned
            self._release()

    async def _call(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the compute thread."""
        return await self._services.scheduler.call(function, self._claim.client.peer_id)

    # ------------------------------------------------------------ out of the cache

    async def _store(self, is_idle: Callable[[], bool]) -> bool:
        """Store everything outside the cache; return False if there is no room, or if the session is wanted."""
        await self._offload.in_thread(self._cut)
        for pieces in _batches(self._pieces):
            known = await self._offload.in_thread(self._hold_known, pieces)
            new = [piece for piece, is_known in zip(pieces, known, strict=True) if not is_known]
            data = await self._call(partial(self._pack, new))
            if not is_idle() or not await self._offload.in_thread(self._hold, new, data):
                return False
        self._states, data = await self._call(self._pack_states)
        for states, stored in zip(self._states, data, strict=True):
            if not await self._offload.in_thread(self._hold_one, states.key, stored, False):
                return False
        return is_idle()

    def _cut(self) -> None:
        """Cut the rows into pieces: the first page of all rows, then the second, and so on."""
        state, groups = self._open_state(), range(len(self._session.layout.groups))
        num_known = min(map(len, state.digests), default=0) if state.hashes is not None else 0
        self._pieces, self._num_shared = [], 0
        for page, start in enumerate(range(0, state.length, PAGE_TOKENS)):
            end = min(start + PAGE_TOKENS, state.length)
            is_shared = page == self._num_shared < num_known and all(
                row.slice(start, end) is not None for row in state.rows
            )
            self._num_shared += is_shared
            for number, row in enumerate(state.rows):
                key = state.digests[number][page] if is_shared else secrets.token_bytes(16)
                num_kept = tuple(sum(map(len, row.slice_of(group, start, end))) for group in groups)
                self._pieces.append(_Piece(number, start, end, key, is_shared, num_kept))

    def _hold_known(self, pieces: Sequence[_Piece]) -> list[bool]:
        """Hold the pieces that are outside the cache already; return which ones."""
        known = [piece.is_shared and self._offload.hold_known(piece.key) for piece in pieces]
        self._held += [(piece.key, True) for piece, is_known in zip(pieces, known, strict=True) if is_known]
        return known

    def _pack(self, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        rows, layout = self._open_state().rows, self._session.layout
        with torch.inference_mode():
            return [pack((rows[each.row],), layout, each.start, each.end).data for each in pieces]

    def _hold(self, pieces: Sequence[_Piece], data: Sequence[torch.Tensor]) -> bool:
        return all(self._hold_one(each.key, stored, each.is_shared) for each, stored in zip(pieces, data, strict=True))

    def _hold_one(self, key: bytes, data: torch.Tensor, is_shared: bool) -> bool:
        is_held = self._offload.hold(key, data)
        if is_held:
            self._held.append((key, is_shared))
        return is_held

    def _pack_states(self) -> tuple[list[_ParkedStates], list[torch.Tensor]]:
        known = self._session.state.states
        parked, data = [], []
        for states in (known, None if known is None else known.before):
            if states is not None:
                parked.append(_ParkedStates.of(states))
                data.append(parked[-1].pack(states))
        return parked, data

    # ------------------------------------------------------------ and back

    async def _return(self) -> None:
        """Take room, fill it with what is outside the cache, and let the session go on."""
        rows, start = await self._call(self._rows_with_room)
        for pieces in _batches([piece for piece in self._pieces if piece.start >= start]):
            data = await self._read([piece.key for piece in pieces])
            await self._call(partial(self._unpack, rows, pieces, data))
        data = await self._read([states.key for states in self._states])
        await self._call(partial(self._go_on, rows, data))

    def _rows_with_room(self) -> tuple[tuple[KvRow, ...], int]:
        """Return rows with room for all positions, and how many of the first ones are in the cache already."""
        session, state = self._session, self._open_state()
        layout, prefix_cache = session.layout, self._services.engine.prefix_cache
        rows, start = (KvRow.empty(layout),) * session.batch_size, 0
        if self._num_shared and prefix_cache is not None:
            found = [prefix_cache.longest(digests[: self._num_shared]) for digests in state.digests]
            for parts in zip(*found, strict=False):  # as many pages as are known of every row: rows are equally long
                rows = tuple(row.extended(more, PAGE_TOKENS) for row, more in zip(rows, parts, strict=True))
            start = rows[0].length
        kept = [piece.num_kept for piece in self._pieces if piece.row == 0 and piece.start >= start]
        if kept:
            counts = [sum(of_group) for of_group in zip(*kept, strict=True)]
            rows = grow(
                rows,
                rows,
                state.length - start,
                layout,
                session.lease,
                reserved=state.length,
                settled=state.settled,
                counts=counts,
            ).rows
        return rows, start

    async def _read(self, keys: Sequence[bytes]) -> list[torch.Tensor]:
        """Return the bytes of these entries. If one is lost, preempt the session and raise NoRoom."""
        data: list[torch.Tensor] = []

        def read() -> None:
            for key in keys:
                if (found := self._offload.read(key)) is None:  # the next one might wait as long for the disk
                    return
                data.append(found)

        await self._offload.in_thread(read)
        if len(data) < len(keys):
            self._claim.preempt()
            raise NoRoom("the session's keys and values could not be read back", 1)
        return data

    def _unpack(self, rows: Sequence[KvRow], pieces: Sequence[_Piece], data: Sequence[torch.Tensor]) -> None:
        layout = self._session.layout
        with torch.inference_mode():
            for piece, stored in zip(pieces, data, strict=True):
                row = rows[piece.row].beginning(piece.end)
                unpack(Stored(piece.end - piece.start, piece.num_kept, stored), (row,), layout)

    def _go_on(self, rows: tuple[KvRow, ...], data: Sequence[torch.Tensor]) -> None:
        session, states = self._session, None
        if self._states:  # the states after the last step, which are first, refer to those before it
            room = RowStatesRoom(session.batch_size, session.layout.state_bytes, session.lease)
            for parked, stored in reversed(list(zip(self._states, data, strict=True))):
                states = parked.unpack(stored, room, states)
        self._services.engine.resume(session, rows, states, self._num_shared)

    def _open_state(self) -> KvState:
        """Return the session's state. Raise PeerBusy if the session has ended meanwhile."""
        state = self._session.state  # read once, because the compute thread may close the session at any time
        if not state.rows:
            raise PeerBusy("the session has ended")
        return state

    def _release(self) -> None:
        held, self._held, self._pieces, self._states = self._held, [], [], []
        for key, is_shared in held:
            self._offload.release(key, keeps=is_shared)

    @property
    def _offload(self) -> KvOffload:
        return self._services.offload


@dataclass(frozen=True)
class _ParkedStates:
    """The recurrent states after ``length`` positions, outside the cache.

    Attributes:
        shapes: for each block, the shape, dtype and device of each state.
    """

    length: int
    key: bytes
    shapes: tuple[tuple[tuple[torch.Size, torch.dtype, torch.device], ...], ...]

    @classmethod
    def of(cls, states: RowStates) -> _ParkedStates:
        shapes = tuple(tuple((state.shape, state.dtype, state.device) for state in block) for block in states.states)
        return cls(states.length, secrets.token_bytes(16), shapes)

    @staticmethod
    def pack(states: RowStates) -> torch.Tensor:
        """Return the states as bytes."""
        return as_bytes(list(chain.from_iterable(states.states)))

    def unpack(self, data: torch.Tensor, room: RowStatesRoom, before: RowStates | None) -> RowStates:
        tensors = TensorReader(data)
        states = tuple(
            tuple(tensors.next(shape, dtype).to(device) for shape, dtype, device in block) for block in self.shapes
        )
        return RowStates(self.length, states, room, before)


def _share_memory(rows: Sequence[KvRow]) -> bool:
    """Return whether some rows of a session refer to the same row of a page."""
    places = [{(part.page, part.row) for part in chain.from_iterable(row.parts)} for row in rows]
    return sum(map(len, places)) > len(set[object]().union(*places))


def _batches(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    """Yield the pieces, a few at a time."""
    return (pieces[first : first + _PIECES_AT_ONCE] for first in range(0, len(pieces), _PIECES_AT_ONCE))
