"""Connections to other servers by peer id, only at the addresses of their signed records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf

from swarm_protocol.dht.records import ServerRecord, SwarmView
from swarm_protocol.errors import BadReply, PeerUnavailable
from swarm_protocol.failures import logged_errors
from swarm_protocol.rpc.shared import SharedReading
from swarm_protocol.rpc.stubs import ServiceStub
from swarm_server.net.push import ChannelPool
from swarm_server.net.push_bundle import PushStream, PushStreams

_logger = logging.getLogger(__name__)
_READ_EVERY_S = 2.0  # at most this often, however many unknown peers are named
_READ_TIMEOUT_S = 10.0


class Neighbours:
    """The servers of the swarm that this server may push to, as last read from the DHT.

    Clients name a next hop by its peer id. An unknown peer has just joined, or does not exist. The swarm is then read
    again, at most once in two seconds, and all simultaneous callers share the result.
    """

    def __init__(self, channels: ChannelPool, read: Callable[[], Awaitable[SwarmView]]) -> None:
        """Create the table; ``read`` returns the servers of the hosted model from the DHT."""
        self._channels = channels
        self._read = read
        self._records: dict[str, ServerRecord] = {}
        self._read_s = -inf  # when the last reading began
        self._reading = SharedReading()
        self._streams = PushStreams(self.stub)

    async def stub(self, peer_id: str) -> ServiceStub:
        """Connect to a server. Raise PeerUnavailable or BadReply if it is unknown or cannot be reached."""
        record = self._records.get(peer_id)
        if record is None:
            await self._read_again()
            record = self._records.get(peer_id)
            if record is None:
                raise PeerUnavailable("the swarm has no record of it")
            return await self._channels.stub(record)
        try:
            return await self._channels.stub(record)
        except (PeerUnavailable, BadReply):
            await self._read_again(may_wait=False)  # the server may have restarted at another address
            newer = self._records.get(peer_id, record)
            if _place(newer) == _place(record):
                raise
            return await self._channels.stub(newer)

    async def push_stream(self, peer_id: str) -> PushStream:
        """Return the stream to the server that all sessions share. Raise the errors of ``stub``."""
        return await self._streams.to(peer_id)

    def open_push_stream(self, peer_id: str) -> PushStream | None:
        """Return the stream to the server that all sessions share; None if none is open."""
        return self._streams.living(peer_id)

    async def knows(self, peer_id: str) -> bool:
        """Return whether the peer is a server of the swarm."""
        if peer_id not in self._records:
            await self._read_again()
        return peer_id in self._records

    async def _read_again(self, may_wait: bool = True) -> None:
        """Wait for a reading that began after this call; without ``may_wait``, return if none may begin yet."""
        if may_wait or self._pause_s() <= 0:
            await self._reading.after_now(self._read_records, lambda: asyncio.sleep(self._pause_s()))

    def _pause_s(self) -> float:
        """Return the time until the next reading may begin."""
        return max(0.0, self._read_s + _READ_EVERY_S - asyncio.get_running_loop().time())

    async def _read_records(self) -> None:
        self._read_s = asyncio.get_running_loop().time()
        # The DHT may fail in any way: outputs can go through the client.
        with logged_errors(_logger, "the servers of the swarm cannot be read", level=logging.WARNING):
            async with asyncio.timeout(_READ_TIMEOUT_S):
                view = await self._read()
            self._records = {record.peer_id: record for record in view.servers}


def _place(record: ServerRecord) -> tuple[tuple[str, ...], bytes]:
    return record.addresses, record.tls_fingerprint
