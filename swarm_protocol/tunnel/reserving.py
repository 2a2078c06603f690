"""A server's stream to a relay: while it is open, peers reach the server through the relay."""

from __future__ import annotations

import asyncio
import time

from swarm_protocol.errors import BadReply, PeerBusy, PeerUnavailable
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import read_message, write, write_message
from swarm_protocol.streams.streams import Stream, Streams
from swarm_protocol.tunnel.accepting import HELLO_TIMEOUT_S
from swarm_protocol.tunnel.members import RelayCredentials
from swarm_protocol.tunnel.relaying import RESERVE

_ANSWER_S = 5.0  # timeout of a relay's answer to a keepalive
_SIGN = b"\0"


class RelayReservation:
    """A server's reservation at a relay.

    Attributes:
        host: the IP address at which the relay sees this server; empty if the relay does not send it.
        lost: done when the relay does not answer any more, or the reservation was closed.
    """

    def __init__(self, relay: str, rtt_s: float, host: str, stream: Stream, keepalive_s: float) -> None:
        self.relay, self.rtt_s, self.host = relay, rtt_s, host
        self._stream = stream
        self.lost = asyncio.ensure_future(self._keep(keepalive_s))

    @property
    def relay_id(self) -> str:
        return self.relay.rpartition("/p2p/")[2]

    async def _keep(self, keepalive_s: float) -> None:
        """Send keepalives, which keep the connection in routers' tables, and detect that it is lost."""
        try:
            while True:
                await self._exchange(keepalive_s)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            self._stream.abort()

    async def _exchange(self, keepalive_s: float) -> None:
        try:
            async with asyncio.timeout(keepalive_s):
                sign = await self._stream.reader.read(1)
            if not sign:
                raise ConnectionResetError("the relay has closed the stream")
        except TimeoutError:  # no message arrives between two keepalives
            await write(self._stream.writer, _SIGN)
            async with asyncio.timeout(_ANSWER_S):
                await self._stream.reader.readexactly(1)

    def close(self) -> None:
        self.lost.cancel()
        self._stream.close()


async def reserve(streams: Streams, relay: str, membership: RelayCredentials, keepalive_s: float) -> RelayReservation:
    """Reserve at a relay's multiaddr; raise PeerUnavailable if it is unreachable, PeerBusy if it refuses."""
    try:
        return await _reserve(streams, relay, membership, keepalive_s)
    except PeerUnavailable:  # the relay may have found an older connection of this server, and closed all of them
        return await _reserve(streams, relay, membership, keepalive_s)


async def _reserve(streams: Streams, relay: str, membership: RelayCredentials, keepalive_s: float) -> RelayReservation:
    stream = await streams.open(relay, RESERVE)
    start_s = time.perf_counter()
    member = membership.shown(streams.peer_id, stream.peer_id)
    try:
        await write_message(stream.writer, pb.Reserve(member=member, keepalive_s=keepalive_s))
        answer = await read_message(stream.reader, pb.Reserved, HELLO_TIMEOUT_S)
    except (OSError, BadReply) as error:
        stream.abort()
        raise PeerUnavailable(f"relay {stream.peer_id} does not answer: {error}", stream.peer_id) from None
    if answer.refusal:
        stream.close()
        raise PeerBusy(answer.refusal, stream.peer_id)
    return RelayReservation(relay, time.perf_counter() - start_s, answer.host, stream, keepalive_s)
