"""The server's end of tunnels and of punched connections: each becomes a connection to the server's own gRPC port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping

from swarm_protocol.dht.records import short_id
from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller, address_at
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import read_message, read_run, write_message
from swarm_protocol.streams.limits import Places
from swarm_protocol.streams.pipe import pipe
from swarm_protocol.streams.streams import Stream, Streams
from swarm_protocol.tunnel.punching import hole_beside, partner

TUNNEL = "/swarm/tunnel/1"
HELLO_TIMEOUT_S = 10.0
_MOST, _MOST_OF_ONE = 512, 16  # tunnels; a client has two or three
_MOST_PUNCHING, _MOST_PUNCHING_OF_ONE = 32, 8  # concurrent punching attempts, in total and through one relay
_logger = logging.getLogger(__name__)


Origins = MutableMapping[tuple[str, int], str]  # the true remote host of each tunnel, by the local end that gRPC sees


class Acceptor:
    """The acceptor of tunnels, from peers that open them directly and from relays on behalf of callers."""

    def __init__(
        self, streams: Streams, host: str, port: int, seen_by: Callable[[str], str | None], origins: Origins
    ) -> None:
        """Set the gRPC port to connect to. The acceptor trusts what relays say of callers.

        ``seen_by``: by peer id, this server's IP address as that relay sees it, or empty; None if it is no relay.
        """
        self._streams = streams
        self._target = host, port
        self._seen_by = seen_by
        self._origins = origins
        self._places = Places("tunnels", _MOST, _MOST_OF_ONE)
        self._punching = Places("connections through routers", _MOST_PUNCHING, _MOST_PUNCHING_OF_ONE)
        self._direct: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._streams.serve(TUNNEL, self._take)

    async def _take(self, stream: Stream) -> None:
        request = await read_message(stream.reader, pb.Open, HELLO_TIMEOUT_S)
        own_host = self._seen_by(stream.peer_id)
        is_relayed = own_host is not None and bool(request.caller)  # a relay may call on its own behalf as well
        caller, caller_host = (request.caller, request.caller_host) if is_relayed else (stream.peer_id, stream.host)
        try:
            with self._places.taken(Caller(caller, address_at(caller_host))):
                may_punch = is_relayed and caller_host != own_host and self._punching.has_room(stream.caller)
                met = partner(caller_host, request.port, stream.host) if may_punch else None
                hole = hole_beside(stream.host) if met is not None else None
                if met is None or hole is None:
                    await self._pipe(stream, caller_host, is_asked=True)
                    return
                with hole, self._punching.taken(stream.caller):
                    await write_message(stream.writer, pb.Opened(host=own_host, port=hole.port))
                    async with asyncio.timeout(HELLO_TIMEOUT_S):
                        await read_run(stream.reader)
                    direct = await hole.through(caller, *met)
                stream.close()
                if direct is not None:
                    await self._pipe_direct(direct, caller_host)
        except PeerBusy as error:
            await write_message(stream.writer, pb.Opened(refusal=str(error)))
        except ConnectionRefusedError:
            await write_message(stream.writer, pb.Opened(refusal="the server is about to end"))

    async def _pipe_direct(self, direct: Stream, caller_host: str) -> None:
        _logger.info("%s is connected directly, through the routers of both", short_id(direct.peer_id))
        piping = asyncio.ensure_future(self._pipe(direct, caller_host))
        self._direct.add(piping)  # keep a reference: the stream through the relay, whose task held one, has ended
        piping.add_done_callback(self._direct.discard)
        try:
            await piping
        finally:
            direct.abort()

    async def _pipe(self, stream: Stream, caller_host: str, *, is_asked: bool = False) -> None:
        """Connect the stream to the gRPC port; ``is_asked``: first send the answer that the caller waits for."""
        reader, writer = await asyncio.open_connection(*self._target)
        # Before the first byte: gRPC asks for the origin when a call begins.
        end = writer.get_extra_info("sockname")[:2]
        self._origins[end] = caller_host
        try:
            if is_asked:
                await write_message(stream.writer, pb.Opened())
            await pipe(reader, writer, stream)
        finally:
            del self._origins[end]
            writer.close()
