"""Replication of a session to another server, for a server that leaves or for a standby."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import encode
from swarm_protocol.wire.constants import MIB
from swarm_server.engine.session_state import Session
from swarm_server.net.push import Parts, Pusher
from swarm_server.sessions.services import SpanServices

_logger = logging.getLogger(__name__)
_CHUNK_TOKENS = 64  # positions copied at a time; steps are computed in between
_FEW = 4  # the most chunks that wait in the queue
_MAX_BYTES = 256 * MIB  # the most bytes of waiting steps: beyond them, the other server is too slow for a standby


class Replicator:
    """The sender of a session's stored data, then of each later step's data, as steps that need no computing."""

    def __init__(self, services: SpanServices, session: Session, to: pb.NextHop) -> None:
        self._services = services
        self._session = session
        self._pusher = Pusher(services.neighbours, to, self._lost)
        self._queue: asyncio.Queue[tuple[pb.Step, Parts]] = asyncio.Queue()
        self._queued_bytes = 0
        self._sent = asyncio.Condition()
        self._copied = 0  # positions that the other session has, or that wait to be sent to it
        self._follows = False  # all stored positions are copied; later steps are copied one by one
        self._start_again = True  # the other session was opened with an earlier number of rows
        self._closed = False
        self._sending = asyncio.ensure_future(self._send_all())

    @property
    def is_closed(self) -> bool:
        """Return whether the copy is given up."""
        return self._closed

    async def copy_all(self, turn: asyncio.Lock, last_number: Callable[[], int]) -> None:
        """Copy all stored positions, and return once the other session has everything.

        Args:
            turn: the lock that is held while the session must not change.
            last_number: a function that returns the number of the session's last step.

        Raises:
            PeerUnavailable: the other server cannot be reached.
        """
        number = 0  # copies have lower numbers than ordinary steps
        while not (self._follows or self._closed):
            async with turn:
                if self._closed:  # perhaps the session too, meanwhile
                    break
                changes: list[pb.Change] = []
                if self._start_again:  # the other session drops its positions, and takes the present number of rows
                    batch_size = self._session.batch_size
                    changes = [pb.Change(crop=pb.Crop()), pb.Change(reorder=pb.Reorder(indices=[0] * batch_size))]
                    self._copied, self._start_again = 0, False
                length = self._session.length
                has_states = bool(self._session.layout.slots)  # recurrent states exist only for the last position
                end = length if has_states else min(self._copied + _CHUNK_TOKENS, length)
                self._follows = end == length
                number += 1
                if end > self._copied:
                    await self._add(last_number() if self._follows else number, changes, self._copied, end)
                self._copied = end
            async with self._sent:
                await self._sent.wait_for(lambda: self._closed or self._queue.qsize() < _FEW)
        async with self._sent:
            await self._sent.wait_for(lambda: self._closed or not self._queued_bytes)
        if self._closed or not await self._pusher.drain():
            raise PeerUnavailable("the server to copy the session to cannot be reached")

    async def follow(self, step: pb.Step) -> None:
        """Copy the data of one step; called after each step of the session, in its turn."""
        if self._closed:
            return
        if self._follows:
            await self._add(step.number, step.changes, step.start_position, self._session.length)
        elif step.start_position < self._copied or any(
            change.WhichOneof("kind") == "reorder" for change in step.changes
        ):
            self._start_again = True

    async def close(self) -> None:
        """Give the copy up; whoever waits for it gets PeerUnavailable."""
        self._closed = True
        self._sending.cancel()
        await self._pusher.retire()
        async with self._sent:
            self._sent.notify_all()

    async def _add(self, number: int, changes: Iterable[pb.Change], start: int, end: int) -> None:
        read = partial(self._services.engine.stored, self._session, start, end)
        stored = await self._services.scheduler.call(read)
        header, parts = encode(stored.data)
        message = pb.Stored(num_tokens=stored.num_tokens, num_kept=stored.num_kept, data=header)
        self._queue.put_nowait((pb.Step(number=number, changes=changes, start_position=start, stored=message), parts))
        self._queued_bytes += header.size_bytes
        if self._queued_bytes > _MAX_BYTES:
            _logger.info("a session is not copied any more: the other server is too slow")
            await self.close()

    async def _lost(self, _step: pb.Step, _parts: Parts) -> None:
        """Stop the replication, because the other server is gone and nothing more need be read for it."""
        self._closed = True
        async with self._sent:
            self._sent.notify_all()

    async def _send_all(self) -> None:
        while True:
            step, parts = await self._queue.get()
            self._services.counters.sent_bytes["copy"] += step.stored.data.size_bytes
            await self._pusher.send(step, parts)
            async with self._sent:
                self._queued_bytes -= step.stored.data.size_bytes
                self._sent.notify_all()
