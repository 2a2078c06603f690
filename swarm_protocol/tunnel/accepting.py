"""A server's end of tunnels: each becomes a connection to its own gRPC port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, MutableMapping

from swarm_protocol.errors import PeerBusy
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import read_message, write_message
from swarm_protocol.streams.limits import Places
from swarm_protocol.streams.pipe import pipe
from swarm_protocol.streams.streams import Stream, Streams

TUNNEL = "/swarm/tunnel/1"
HELLO_TIMEOUT_S = 10.0
_MOST, _MOST_OF_ONE = 512, 16  # tunnels; a client has two or three
_logger = logging.getLogger(__name__)


Origins = MutableMapping[tuple[str, int], str]  # where the connections of tunnels come from, by the end that gRPC sees


class Acceptor:
    """Takes tunnels from peers that open them directly, and from relays for others."""

    def __init__(self, streams: Streams, host: str, port: int, relays: Collection[str], origins: Origins) -> None:
        """``relays``: peer ids of those that are asked to relay; what they say of a caller is taken for true."""
        self._streams = streams
        self._target = host, port
        self._relays = relays
        self._origins = origins
        self._places = Places("tunnels", _MOST, _MOST_OF_ONE)

    async def start(self) -> None:
        await self._streams.serve(TUNNEL, self._take)

    async def _take(self, stream: Stream) -> None:
        request = await read_message(stream.reader, pb.Open, HELLO_TIMEOUT_S)
        is_relayed = stream.peer_id in self._relays and bool(request.caller)  # a relay may call as well
        caller = request.caller if is_relayed else stream.peer_id
        try:
            with self._places.taken(caller):
                reader, writer = await asyncio.open_connection(*self._target)
                end = writer.get_extra_info("sockname")[:2]
                self._origins[end] = request.caller_host if is_relayed else stream.host
                try:
                    await write_message(stream.writer, pb.Opened())
                    await pipe(reader, writer, stream)
                finally:
                    del self._origins[end]
                    writer.close()
        except PeerBusy as error:
            await write_message(stream.writer, pb.Opened(refusal=str(error)))
        except ConnectionRefusedError:
            await write_message(stream.writer, pb.Opened(refusal="the server is about to end"))
