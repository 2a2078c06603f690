"""Dial-back tests of whether a peer is reachable: another peer tries to connect to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from itertools import chain, islice, zip_longest

from swarm_protocol.dht.addresses import connects
from swarm_protocol.errors import BadReply, PeerBusy, SwarmError
from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.ip_networks import parse_host
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import read_message, write_message
from swarm_protocol.streams.limits import Places
from swarm_protocol.streams.streams import Stream, Streams
from swarm_protocol.tunnel.accepting import HELLO_TIMEOUT_S

DIAL_BACK = "/swarm/dial-back/1"
_MAX_ADDRESSES = 4
_places = Places("peers that are dialled back", 16, 1)  # in total, and for each peer


async def serve_dial_back(streams: Streams) -> None:
    """Answer dial-back requests. Only the requester's own address is dialled: a peer cannot redirect the dials."""
    await streams.serve(DIAL_BACK, _answer)


async def ask_dial_back(streams: Streams, peer: str, addresses: Sequence[str]) -> pb.DialedBack | None:
    """Return a peer's dial-back result for these ``HOST:PORT``; None if it does not answer. ``peer``: multiaddr or id.

    Names are resolved here, because peers do not resolve names for untrusted peers.
    """
    asked = await _by_ip(addresses)
    if not asked:
        return None
    try:
        stream = await streams.open(peer, DIAL_BACK)
        try:
            await write_message(stream.writer, pb.DialBack(addresses=list(asked)))
            answer = await read_message(stream.reader, pb.DialedBack, HELLO_TIMEOUT_S)
        finally:
            stream.close()
    except (SwarmError, OSError):
        return None
    reached = {asked[address] for address in answer.reached if address in asked}
    return pb.DialedBack(reached=[address for address in addresses if address in reached], host=answer.host)


async def _answer(stream: Stream) -> None:
    request = await read_message(stream.reader, pb.DialBack, HELLO_TIMEOUT_S)
    if len(request.addresses) > _MAX_ADDRESSES:
        raise BadReply(f"{len(request.addresses)} addresses are to be dialled: expected at most {_MAX_ADDRESSES}")
    try:
        with _places.taken(stream.caller):
            tried = await asyncio.gather(*(_is_reached(address, stream.host) for address in request.addresses))
    except PeerBusy:
        return  # the requester treats silence as no result
    reached = [address for address, is_reached in zip(request.addresses, tried, strict=True) if is_reached]
    await write_message(stream.writer, pb.DialedBack(reached=reached, host=stream.host))


async def _by_ip(addresses: Sequence[str]) -> dict[str, str]:
    """Return addresses by ``IP:PORT``: the first IP of each address, then the second, up to the limit."""
    found: list[list[tuple[str, str]]] = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        ips = sorted(await ips_of(host.strip("[]")))
        found.append([(host_port(ip, int(port)), address) for ip in ips])
    in_turn = chain.from_iterable(zip_longest(*found))
    return dict(islice((pair for pair in in_turn if pair is not None), _MAX_ADDRESSES))


async def _is_reached(address: str, from_host: str) -> bool:
    host, _, port = address.rpartition(":")
    ip = parse_host(host)
    if not port.isdecimal() or not 0 < int(port) < 65536 or ip is None or str(ip) != from_host:
        return False
    return await connects(from_host, int(port))


async def ips_of(host: str) -> set[str]:
    """Return the IP addresses of a host name or IP address; empty if the name is unknown."""
    ip = parse_host(host)
    if ip is not None:
        return {str(ip)}
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {str(entry[4][0]) for entry in found}
