"""Streams of libp2p: to other peers, and from other peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_protocol.net.hivemind_parts import DAEMON_ERRORS, P2P, Multiaddr, PeerID
from swarm_protocol.net.shares import Caller, address_at
from swarm_protocol.wire.printable import printable

OPEN_TIMEOUT_S = 5.0
_LINGER_S = 10.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stream:
    """A stream to or from another peer.

    Attributes:
        peer_id: the peer at the other end, authenticated by libp2p.
        host: the IP address of the other end, or empty.
    """

    peer_id: str
    host: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def caller(self) -> Caller:
        return Caller(self.peer_id, address_at(self.host))

    def close(self) -> None:
        """Close the stream; written data are still sent, if the other end reads them soon."""
        if not self.writer.is_closing():
            self.writer.close()
            asyncio.get_running_loop().call_later(_LINGER_S, self.writer.transport.abort)

    def abort(self) -> None:
        self.writer.transport.abort()


Handler = Callable[[Stream], Awaitable[None]]


class Streams(Protocol):
    """The interface to libp2p that tests can replace."""

    @property
    def peer_id(self) -> str: ...

    async def open(self, peer: str, protocol: str) -> Stream: ...

    async def serve(self, protocol: str, handler: Handler) -> None: ...

    async def disconnect(self, peer_id: str) -> None: ...


class DaemonStreams:
    """The streams of the libp2p daemon. If another daemon replaces it, call ``attach``."""

    def __init__(self, daemon: Callable[[], P2P | None] = lambda: None) -> None:
        """Set the function that returns the running daemon, or None while there is none."""
        self._daemon = daemon
        self._handlers: dict[str, Handler] = {}

    def use(self, daemon: Callable[[], P2P | None]) -> None:
        """Use the daemon that ``daemon`` returns from now on."""
        self._daemon = daemon

    @property
    def peer_id(self) -> str:
        return str(self._p2p().peer_id)

    async def open(self, peer: str, protocol: str) -> Stream:
        """Open a stream to ``peer``, a multiaddr or a connected peer's id; raise PeerUnavailable if that fails."""
        transport, _, name = peer.rpartition("/p2p/")
        try:
            p2p, peer_id = self._p2p(), PeerID.from_base58(name)
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                if transport:
                    await p2p._client.connect(peer_id, [Multiaddr(transport)])
                info, reader, writer = await p2p.call_binary_stream_handler(peer_id, protocol)
        except TimeoutError:
            raise PeerUnavailable(f"no stream to {printable(peer, 80)} within {OPEN_TIMEOUT_S:g} s", name) from None
        except (*DAEMON_ERRORS, ValueError) as error:  # ValueError: ``peer`` is no address
            raise PeerUnavailable(f"no stream to {printable(peer, 80)}: {printable(str(error), 120)}", name) from None
        return Stream(name, _host(info.addr), reader, writer)

    async def serve(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler
        await self._register(protocol, handler)

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer: libp2p would use a dead one for most of a minute."""
        with suppress(*DAEMON_ERRORS, ValueError, SwarmError):
            await self._p2p()._client.disconnect(PeerID.from_base58(peer_id))

    async def attach(self) -> None:
        """Register all handlers with a daemon that has just started."""
        for protocol, handler in self._handlers.items():
            await self._register(protocol, handler)

    async def _register(self, protocol: str, handler: Handler) -> None:
        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = Stream(info.peer_id.to_base58(), _host(info.addr), reader, writer)
            try:
                await handler(stream)
            except (OSError, asyncio.IncompleteReadError, SwarmError) as error:
                _logger.debug("a stream of %s ended: %r", protocol, error)
                stream.abort()
            finally:
                stream.close()

        await self._p2p().add_binary_stream_handler(protocol, handle)

    def _p2p(self) -> P2P:
        p2p = self._daemon()
        if p2p is None:
            raise PeerUnavailable("there is no libp2p daemon, through which tunnels go")
        return p2p


def _host(address: Any) -> str:
    """Return the IP address in a multiaddr; empty if there is none."""
    parts = str(address).split("/")
    return parts[2] if len(parts) > 2 and parts[1] in ("ip4", "ip6") else ""
