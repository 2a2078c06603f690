"""Pieces from several members at once, each verified before it counts, until all that are wanted are there.

Members take the next piece whenever they have sent one, so that fast ones send more. One that is slow with one of the
last pieces is not waited for, one that fails is left out, and one that sends wrong bytes is never asked again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from swarm_protocol.dht.records import short_id
from swarm_protocol.errors import BadReply, CheckpointError, PeerUnavailable, SwarmError
from swarm_protocol.process.logs import shows_progress
from swarm_protocol.sharing.manifest import HeldPieces, SharedFile
from swarm_protocol.sharing.piece_store import PieceStore

InThread = Callable[..., Awaitable[Any]]
Wanted = Iterable[tuple[SharedFile, Iterable[int]]]
_STREAMS = 2  # of one member, so that it reads a piece while another travels
_MAX_MEMBERS = 8  # at a time: a piece in memory for each stream
_IDLE_S = 10.0  # between two parts of a piece
_POLL_S = 0.2
_MAX_FAILURES = 4  # of a member, one after the other
_BACKOFF_S = 0.5  # after a failure, twice as long after each further one
_AGAIN_S = 2.0  # until members are looked for again, when those that were known have nothing more
PATIENCE_S = 60.0  # without a piece
_LEAST_STEAL_S = 1.0  # that a piece is under way before another member is asked too
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class OfferingMember:
    """A member, what it has, and how a piece is read from it by its digest; reading raises SwarmError."""

    peer_id: str
    offer: HeldPieces
    read: Callable[[bytes], AsyncGenerator[bytes, None]]

    def has(self, piece: Piece) -> bool:
        return piece.index in self.offer.held.get(piece.file.key, ())


@dataclass(frozen=True)
class Piece:
    """One piece of a file."""

    file: SharedFile
    index: int

    @property
    def size_bytes(self) -> int:
        return self.file.piece_bytes(self.index)


class Download:
    """Fetches what is missing in a store. Used on one event loop."""

    def __init__(
        self,
        store: PieceStore,
        find: Callable[[], Awaitable[Sequence[OfferingMember]]],
        on_wrong: Callable[[str], None] = lambda _peer_id: None,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        """``find``: members that offer something now. ``on_wrong`` is told the peer id of who sends wrong bytes."""
        self._store = store
        self._find = find
        self._on_wrong = on_wrong
        self._in_thread = in_thread
        self._blocked: set[str] = set()
        self._one_at_a_time = asyncio.Lock()

    async def fetch(self, wanted: Wanted) -> None:
        """Return when these pieces are there.

        Raises:
            CheckpointError: no member has offered one of them for ``PATIENCE_S``, or the disk is full.
        """
        async with self._one_at_a_time:
            found = await self._in_thread(self._missing, list(wanted))
            if not found:
                return
            size_bytes = sum(piece.size_bytes for piece in found)
            self._store.require_room(size_bytes)
            bar: tqdm[Any] = tqdm(
                total=size_bytes,
                desc="weights from the swarm",
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                leave=False,
                disable=not shows_progress(),
            )
            with bar:
                await self._all(found, bar)

    def _missing(self, wanted: Wanted) -> list[Piece]:
        return [Piece(file, index) for file, indices in wanted for index in self._store.missing(file, indices)]

    async def _all(self, pieces: Iterable[Piece], bar: tqdm[Any]) -> None:
        clock, todo = asyncio.get_running_loop().time, dict.fromkeys(pieces)
        arrived_s = clock()
        while todo:
            members = [member for member in await self._find() if member.peer_id not in self._blocked]
            useful = [member for member in members if any(map(member.has, todo))][:_MAX_MEMBERS]
            num_left = len(todo)
            if useful:
                await _Round(self, useful, todo, bar).run()
            if len(todo) < num_left:
                arrived_s = clock()
            elif clock() - arrived_s > PATIENCE_S:
                piece = next(iter(todo))
                raise CheckpointError(
                    f"no member of the swarm gives piece {piece.index} of {piece.file.name} of "
                    f"{self._store.manifest.model}: {len(members)} offer something, {len(todo)} pieces are missing; "
                    "what has come is kept for the next start"
                )
            if todo:
                await asyncio.sleep(_AGAIN_S)

    async def keep(self, piece: Piece, data: bytearray, member: OfferingMember) -> bool:
        """Return whether the piece is right; who has sent a wrong one is blocked."""
        try:
            await self._in_thread(self._store.write, piece.file, piece.index, data)
            return True
        except BadReply as error:
            if member.peer_id not in self._blocked:
                self._blocked.add(member.peer_id)
                _logger.warning("%s has sent wrong bytes and is not asked again: %s", short_id(member.peer_id), error)
                self._on_wrong(member.peer_id)
            return False


class _Round:
    """The work of some members until all pieces are there, or none of them can send any more."""

    def __init__(
        self, download: Download, members: Collection[OfferingMember], todo: dict[Piece, None], bar: tqdm[Any]
    ) -> None:
        self._download = download
        self._members = members
        self._todo = todo
        self._free = dict(todo)  # that nobody sends
        self._begun_s: dict[Piece, float] = {}  # of pieces that one member sends: when it was asked
        self._bar = bar
        self._clock = asyncio.get_running_loop().time
        self._is_done = asyncio.Event()

    async def run(self) -> None:
        """Raises CheckpointError if what has come cannot be written."""
        working: asyncio.Future[Any] = asyncio.gather(
            *(self._work(member) for member in self._members for _ in range(_STREAMS))
        )
        done: asyncio.Future[Any] = asyncio.ensure_future(self._is_done.wait())
        try:
            await asyncio.wait([working, done], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            done.cancel()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _work(self, member: OfferingMember) -> None:
        failures, took_s = 0, _LEAST_STEAL_S
        while self._todo:
            piece = self._next(member, took_s)
            if piece is None:
                if not any(map(member.has, self._todo)):
                    return
                await asyncio.sleep(_POLL_S)
                continue
            start_s = self._clock()
            try:
                data = await self._read(member, piece)
            except SwarmError as error:
                _logger.info("no piece from %s: %s", short_id(member.peer_id), error)
                failures += 1
                self._give_back(piece)
                if failures >= _MAX_FAILURES:
                    return
                await asyncio.sleep(_BACKOFF_S * 2**failures)
                continue
            except BaseException:
                self._give_back(piece)
                raise
            failures, took_s = 0, max(_LEAST_STEAL_S, self._clock() - start_s)
            if data is not None and not await self._take(piece, data, member):
                return

    def _next(self, member: OfferingMember, took_s: float) -> Piece | None:
        """One that nobody sends; or that another has been sending for twice as long as this member takes."""
        now_s = self._clock()
        piece = next((piece for piece in self._free if member.has(piece)), None)
        if piece is None:
            late = (piece for piece, begun_s in self._begun_s.items() if now_s - begun_s > 2 * took_s)
            piece = next((piece for piece in late if member.has(piece)), None)
            if piece is not None:
                del self._begun_s[piece]  # two are enough
        else:
            del self._free[piece]
            self._begun_s[piece] = now_s
        return piece

    def _give_back(self, piece: Piece) -> None:
        if piece in self._todo:
            self._free[piece] = None
            self._begun_s.pop(piece, None)

    async def _read(self, member: OfferingMember, piece: Piece) -> bytearray | None:
        """None: another member was faster. What is too long is not read to its end."""
        data = bytearray()
        async with aclosing(member.read(piece.file.pieces[piece.index])) as parts:
            while len(data) <= piece.size_bytes:
                try:
                    async with asyncio.timeout(_IDLE_S):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise PeerUnavailable(f"it has sent nothing for {_IDLE_S:g} s", member.peer_id) from None
                if piece not in self._todo:
                    return None
                if part is None:
                    break
                data += part
        if len(data) < piece.size_bytes:
            raise PeerUnavailable("it has sent only some of the piece", member.peer_id)
        return data

    async def _take(self, piece: Piece, data: bytearray, member: OfferingMember) -> bool:
        """Return whether the member is asked for more."""
        is_right = await self._download.keep(piece, data, member)
        if not is_right:
            self._give_back(piece)
        elif piece in self._todo:
            del self._todo[piece]
            self._free.pop(piece, None)
            self._begun_s.pop(piece, None)
            self._bar.update(piece.size_bytes)
            if not self._todo:
                self._is_done.set()
        return is_right
