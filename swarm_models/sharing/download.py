"""A parallel download of pieces from several members; each piece is verified before it counts.

A member gets its next request whenever it has sent a piece, so that fast members send more. A late piece is requested
from another member, too. A member that fails or is too slow is replaced, and a member that sends wrong bytes is not
asked again.

The number of pieces in flight adapts so that each keeps a minimum speed, as in TCP's congestion control: the
number grows by one with each piece, and falls below its present value with each piece that is too slow.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from typing import Any

from tqdm import tqdm

from swarm_models.sharing.manifest import HeldPieces, SharedFile
from swarm_models.sharing.piece_store import PieceStore
from swarm_protocol.backoff import Backoff
from swarm_protocol.dht.records import short_id
from swarm_protocol.errors import BadReply, CheckpointError, PeerBusy, PeerUnavailable, SwarmError
from swarm_protocol.process.logs import progress_bar
from swarm_protocol.process.routine import end_tasks

InThread = Callable[..., Awaitable[Any]]
Wanted = Iterable[tuple[SharedFile, Iterable[int]]]
_STREAMS = 2  # per member, so that it reads a piece while another one travels
_MAX_MEMBERS = 8  # at a time: each stream needs memory for one piece
_IDLE_S = 10.0  # timeout between two parts of a piece
_POLL_S = 0.2
_MAX_FAILURES = 4  # of a member, in a row
_BACKOFF = Backoff(first_s=1.0, most_s=60.0)
_AGAIN_S = 2.0  # pause before members are looked for again, when none sends
_LOOK_S = 30.0  # pause before new members are looked for, while others send
LEAST_BYTES_PER_S = 64 * 1024  # minimum for a piece that has travelled for some time
_BUSY_S = 5.0  # pause before a busy member is asked again
PATIENCE_S = 60.0  # maximum time in which no piece arrives at the minimum speed and no member is merely busy
_MAX_WAIT_S = 3600.0  # maximum for one piece, even if members say that they are busy
_LEAST_STEAL_S = 1.0  # minimum time before a piece in flight is requested from another member too
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class OfferingMember:
    """A member with its offer, and a function that reads a piece by its digest; reading raises SwarmError."""

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
    """The download of pieces that are missing in a store. Used on one event loop."""

    def __init__(
        self,
        store: PieceStore,
        find: Callable[[], Awaitable[Sequence[OfferingMember]]],
        on_wrong: Callable[[str], None] = lambda _peer_id: None,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        """Set how to ``find`` members with offers; ``on_wrong`` gets the peer id of a member that sends wrong bytes."""
        self.store = store
        self.find = find
        self._on_wrong = on_wrong
        self._in_thread = in_thread
        self.blocked: set[str] = set()
        self._one_at_a_time = asyncio.Lock()

    async def fetch(self, wanted: Wanted) -> None:
        """Wait until these pieces are in the store.

        Raises:
            CheckpointError: no member has sent a piece for ``PATIENCE_S`` (busy members: for an hour), or the disk is
                full.
        """
        async with self._one_at_a_time:
            found = await self._in_thread(self._missing, list(wanted))
            if not found:
                return
            size_bytes = sum(piece.size_bytes for piece in found)
            self.store.require_room(size_bytes)
            with progress_bar(size_bytes, "weights from the swarm", unit="B", unit_scale=True) as bar:
                await _Transfers(self, found, bar).run()

    def _missing(self, wanted: Wanted) -> list[Piece]:
        return [Piece(file, index) for file, indices in wanted for index in self.store.missing(file, indices)]

    async def keep(self, piece: Piece, data: bytearray, member: OfferingMember) -> bool:
        """Store a piece; return whether it is right. A member that sends a wrong piece is blocked."""
        try:
            await self._in_thread(self.store.write, piece.file, piece.index, data)
            return True
        except BadReply as error:
            if member.peer_id not in self.blocked:
                self.blocked.add(member.peer_id)
                _logger.warning("%s has sent wrong bytes and is not asked again: %s", short_id(member.peer_id), error)
                self._on_wrong(member.peer_id)
            return False


class _TooSlow(PeerUnavailable):
    """A piece arrives at less than the minimum speed."""


class _Transfers:
    """The missing pieces of one download, and the members that send them."""

    def __init__(self, download: Download, pieces: Iterable[Piece], bar: tqdm[Any]) -> None:
        self._download, self._bar = download, bar
        self._clock = asyncio.get_running_loop().time
        self._todo = dict.fromkeys(pieces)
        self._senders: dict[Piece, set[str]] = {piece: set() for piece in self._todo}  # peer ids
        self._begun_s: dict[Piece, float] = {}  # when last requested; without pieces being written
        self._num_travelling = self._num_written = 0  # pieces, at this moment
        self._most = _STREAMS * _MAX_MEMBERS  # limit of pieces in flight
        self._members: dict[str, OfferingMember] = {}
        self._failures: Counter[str] = Counter()  # in a row, by peer id
        self._refusals: Counter[str] = Counter()  # by peer id: how often the member was busy
        self._working: dict[str, list[asyncio.Task[None]]] = {}
        self._arrived_s = self._alive_s = self._clock()  # last piece arrived; last sign that waiting is worthwhile
        self._is_done = asyncio.Event()

    async def run(self) -> None:
        """Return when all pieces are there; raise CheckpointError if a piece cannot be written, or none arrives."""
        seeking = asyncio.ensure_future(self._seek())
        done = asyncio.ensure_future(self._is_done.wait())
        try:
            await asyncio.wait([seeking, done], return_when=asyncio.FIRST_COMPLETED)
            if seeking.done():
                seeking.result()
        finally:
            await end_tasks([seeking, done, *(task for tasks in self._working.values() for task in tasks)])

    async def _seek(self) -> None:
        """Look for members, and start requests to them, as long as pieces are missing."""
        looked_s = -inf
        while self._todo:
            if not self._working or self._clock() - looked_s >= _LOOK_S:
                found, looked_s = await self._download.find(), self._clock()
                self._members = {each.peer_id: each for each in found if each.peer_id not in self._download.blocked}
                self._start()
            await asyncio.sleep(_AGAIN_S)
            for peer_id, tasks in list(self._working.items()):
                ended = [task for task in tasks if task.done()]
                for task in ended:
                    task.result()
                if len(ended) == len(tasks):
                    del self._working[peer_id]
            self._require_progress()

    def _start(self) -> None:
        useful = [each for each in self._members.values() if any(map(each.has, self._todo))]
        least = min((self._failures[each.peer_id] for each in useful), default=0)
        if self._most < _STREAMS * _MAX_MEMBERS:  # slow members would take the little bandwidth that is left
            useful = [each for each in useful if self._failures[each.peer_id] == least]
        idle = [each for each in useful if each.peer_id not in self._working]
        idle.sort(key=lambda each: (self._failures[each.peer_id], self._refusals[each.peer_id]))
        for member in idle[: max(0, _MAX_MEMBERS - len(self._working))]:
            self._working[member.peer_id] = [asyncio.ensure_future(self._work(member)) for _ in range(_STREAMS)]

    def _require_progress(self) -> None:
        now_s = self._clock()
        if self._num_written or (now_s - self._alive_s <= PATIENCE_S and now_s - self._arrived_s <= _MAX_WAIT_S):
            return
        piece = next(iter(self._todo))
        raise CheckpointError(
            f"no member of the swarm gives piece {piece.index} of {piece.file.name} of "
            f"{self._download.store.manifest.model}: {len(self._members)} members offer pieces, and "
            f"{len(self._todo)} pieces are missing; those that have come are kept for the next start"
        )

    async def _work(self, member: OfferingMember) -> None:
        peer_id, took_s = member.peer_id, _LEAST_STEAL_S
        while self._todo and peer_id not in self._download.blocked:  # the other stream may have got wrong bytes
            member = self._members.get(peer_id, member)  # the member may have more pieces by now
            piece = self._next(member, took_s)
            if piece is None:
                if not any(map(member.has, self._todo)):
                    return
                await asyncio.sleep(_POLL_S)
                continue
            start_s = self._begin(piece, peer_id)
            try:
                data = await self._read(member, piece)
                took_s = max(_LEAST_STEAL_S, self._clock() - start_s)
                if data is not None:
                    if not await self._take(piece, data, member):
                        return
                    self._failures[peer_id] = 0
                continue
            except PeerBusy as error:
                self._count_refusal(peer_id, error)
                if len(self._working) >= _MAX_MEMBERS:
                    return  # so that other members are asked
                wait_s = _BUSY_S
            except CheckpointError:  # of this machine's disk: another member would not help
                raise
            except SwarmError as error:
                self._count_failure(peer_id, error)
                if isinstance(error, _TooSlow) or self._failures[peer_id] >= _MAX_FAILURES:
                    return
                wait_s = _BACKOFF.after(self._failures[peer_id])
            finally:
                self._leave(piece, peer_id)
            await asyncio.sleep(wait_s)

    def _next(self, member: OfferingMember, took_s: float) -> Piece | None:
        """Return a piece that no member sends, or one that has been in flight for twice this member's usual time."""
        if self._num_travelling >= self._most:
            return None
        free = (piece for piece, senders in self._senders.items() if not senders and member.has(piece))
        if (piece := next(free, None)) is not None:
            return piece
        now_s = self._clock()
        late = [piece for piece, begun_s in self._begun_s.items() if now_s - begun_s > 2 * took_s]
        return next((each for each in late if member.has(each) and member.peer_id not in self._senders[each]), None)

    def _count_refusal(self, peer_id: str, error: PeerBusy) -> None:
        if self._alive_s <= self._arrived_s:  # once in a wait: a refusal or a slow piece sets the time
            _logger.info("waiting for members that are busy: %s says %s", short_id(peer_id), error)
        self._alive_s = self._clock()
        self._refusals[peer_id] += 1

    def _count_failure(self, peer_id: str, error: SwarmError) -> None:
        _logger.info("no piece from %s: %s", short_id(peer_id), error)
        self._failures[peer_id] += 1
        if isinstance(error, _TooSlow):
            self._most = max(1, self._num_travelling - 1)

    def _begin(self, piece: Piece, peer_id: str) -> float:
        """Note that this member sends the piece from now on; return the time."""
        self._begun_s[piece] = start_s = self._clock()
        self._senders[piece].add(peer_id)
        self._num_travelling += 1
        return start_s

    def _leave(self, piece: Piece, peer_id: str) -> None:
        self._num_travelling -= 1
        if senders := self._senders.get(piece):
            senders.discard(peer_id)
            if not senders:
                self._begun_s.pop(piece, None)

    async def _read(self, member: OfferingMember, piece: Piece) -> bytearray | None:
        """Read a piece, but not past its size; return None if another member was faster."""
        data, start_s = bytearray(), self._clock()
        async with aclosing(member.read(piece.file.pieces[piece.index])) as parts:
            while len(data) <= piece.size_bytes:
                try:
                    async with asyncio.timeout(_IDLE_S):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise _TooSlow(f"it has sent nothing for {_IDLE_S:g} s", member.peer_id) from None
                if piece not in self._todo:
                    return None
                if part is None:
                    break
                data += part
                judged_s = self._clock() - start_s - _IDLE_S  # a piece may begin slowly
                if judged_s > 0:
                    if len(data) < min(piece.size_bytes, LEAST_BYTES_PER_S * judged_s):
                        raise _TooSlow(f"it sends less than {LEAST_BYTES_PER_S / 1024:g} KiB/s", member.peer_id)
                    self._alive_s = self._clock()
        if len(data) < piece.size_bytes:
            raise PeerUnavailable("it has sent only some of the piece", member.peer_id)
        return data

    async def _take(self, piece: Piece, data: bytearray, member: OfferingMember) -> bool:
        """Store a piece, and return whether to ask the member for more.

        While a piece is written, no other member is asked for it.
        """
        self._begun_s.pop(piece, None)
        self._num_written += 1
        try:
            is_right = await self._download.keep(piece, data, member)
        finally:
            self._num_written -= 1
        if is_right and piece in self._todo:
            del self._todo[piece], self._senders[piece]
            self._begun_s.pop(piece, None)
            self._arrived_s = self._alive_s = self._clock()
            self._most = min(_STREAMS * _MAX_MEMBERS, self._most + 1)
            self._bar.update(piece.size_bytes)
            if not self._todo:
                self._is_done.set()
        return is_right
