"""TCP hole punching: direct connections between two peers that are both behind routers.

A router accepts a packet from an address to which a machine behind it is just connecting. Both peers connect at the
same moment, from ports that they have exchanged through a relay. This works where routers keep a connection's port, as
most home routers do. Where they choose another port, the relay keeps carrying the data. See Ford, Srisuresh and Kegel,
"Peer-to-Peer Communication Across Network Address Translators" (USENIX 2005).
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from swarm_protocol.failures import Closing, undone_on_error
from swarm_protocol.net.ip_networks import parse_host
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.streams.streams import Stream

PUNCH_S = 3.5  # lost packets are sent again after one second, and after three
_AGAIN_S = 0.1
# Routers forget idle connections. Without TCP keepalive, neither program would send anything while it is idle.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Hole(Closing):
    """A local port from which this machine connects to a peer, and on which it accepts the peer's connection too."""

    def __init__(self, family: socket.AddressFamily) -> None:
        """Open the port; raise OSError if that fails."""
        self._family = family
        self._listener = self._bound(0)
        self._listener.listen(1)
        self.port: int = self._listener.getsockname()[1]

    def close(self) -> None:
        """Close the listener; connections stay open."""
        self._listener.close()

    async def through(self, peer_id: str, host: str, port: int) -> Stream | None:
        """Connect to the peer, which does the same at about the same time; return None if this fails or is late.

        Both attempts use the same two ports, so only one connection results.
        """
        try:
            connection = await self._connection(host, port)
            if connection is None:
                return None
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            return Stream(peer_id, host, *await asyncio.open_connection(sock=connection))
        except OSError:  # any local refusal
            return None

    async def _connection(self, host: str, port: int) -> socket.socket | None:
        ways = [asyncio.ensure_future(way) for way in (self._taken(host, port), self._made(host, port))]
        try:
            await asyncio.wait(ways, timeout=PUNCH_S, return_when=asyncio.FIRST_COMPLETED)
            found = [way.result() for way in ways if way.done()]
        finally:
            await end_tasks(ways)
        return found[0] if found else None

    async def _taken(self, host: str, port: int) -> socket.socket:
        while True:
            connection, address = await asyncio.get_running_loop().sock_accept(self._listener)
            if (str(parse_host(address[0])), address[1]) == (host, port):
                return connection
            connection.close()  # of another peer, or of somebody who tries ports

    async def _made(self, host: str, port: int) -> socket.socket:
        while True:
            connection = self._bound(self.port)
            with suppress(OSError), undone_on_error(connection.close):
                await asyncio.get_running_loop().sock_connect(connection, (host, port))
                return connection
            # The attempt was refused: the remote router has not seen the peer's packet yet.
            await asyncio.sleep(_AGAIN_S)

    def _bound(self, port: int) -> socket.socket:
        bound = socket.socket(self._family, socket.SOCK_STREAM)
        with undone_on_error(bound.close):  # the caller has no socket that it could close
            bound.setblocking(False)
            # The listener and each attempt to connect share the port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(("", port))
        return bound


def hole_beside(relay_host: str) -> Hole | None:
    """Return a hole in the relay's network; None if the relay is this machine, or this system cannot punch."""
    ip = parse_host(relay_host)
    if ip is None or ip.is_loopback or not hasattr(socket, "SO_REUSEPORT"):
        return None
    try:
        return Hole(socket.AF_INET if ip.version == 4 else socket.AF_INET6)
    except OSError:
        return None


def partner(host: str, port: int, relay_host: str) -> tuple[str, int] | None:
    """Return the IP address and port at which a peer is said to be; None if connecting there is not allowed.

    Both peers must be on the same network as their relay: a peer on the internet may not name addresses at home.
    """
    ip, relay = parse_host(host), parse_host(relay_host)
    if ip is None or relay is None or (ip.version, ip.is_global) != (relay.version, relay.is_global):
        return None
    if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or not 0 < port < 65536:
        return None
    return str(ip), port
