"""Whether a peer can be reached: another one tries to connect to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from swarm_protocol.dht.addresses import connects
from swarm_protocol.errors import BadReply, PeerBusy, SwarmError
from swarm_protocol.net.ip_networks import parse_host
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import read_message, write_message
from swarm_protocol.streams.limits import Places
from swarm_protocol.streams.streams import Stream, Streams
from swarm_protocol.tunnel.accepting import HELLO_TIMEOUT_S

DIAL_BACK = "/swarm/dial-back/1"
_MAX_ADDRESSES = 4
_places = Places("peers that are dialled back", 16, 1)


async def serve_dial_back(streams: Streams) -> None:
    """Answers others. A peer cannot have others dialled: only the address is tried that it comes from."""
    await streams.serve(DIAL_BACK, _answer)


async def ask_dial_back(streams: Streams, peer: str, addresses: Sequence[str]) -> pb.DialedBack | None:
    """What a peer, given by multiaddr or id, says of these ``HOST:PORT``; None if it does not say."""
    try:
        stream = await streams.open(peer, DIAL_BACK)
        try:
            await write_message(stream.writer, pb.DialBack(addresses=addresses[:_MAX_ADDRESSES]))
            return await read_message(stream.reader, pb.DialedBack, HELLO_TIMEOUT_S)
        finally:
            stream.close()
    except (SwarmError, OSError):
        return None


async def _answer(stream: Stream) -> None:
    request = await read_message(stream.reader, pb.DialBack, HELLO_TIMEOUT_S)
    if len(request.addresses) > _MAX_ADDRESSES:
        raise BadReply(f"{len(request.addresses)} addresses are to be dialled: expected at most {_MAX_ADDRESSES}")
    try:
        with _places.taken(stream.peer_id):
            tried = await asyncio.gather(*(_is_reached(address, stream.host) for address in request.addresses))
    except PeerBusy:
        return  # no answer is no news
    reached = [address for address, is_reached in zip(request.addresses, tried, strict=True) if is_reached]
    await write_message(stream.writer, pb.DialedBack(reached=reached, host=stream.host))


async def _is_reached(address: str, from_host: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536 or from_host not in await ips_of(host.strip("[]")):
        return False
    return await connects(from_host, int(port))


async def ips_of(host: str) -> set[str]:
    """Of a name or an IP address; none if it is not known."""
    ip = parse_host(host)
    if ip is not None:
        return {str(ip)}
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {str(entry[4][0]) for entry in found}
