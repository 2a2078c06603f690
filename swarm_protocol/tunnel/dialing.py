"""gRPC channels to servers at any kind of address: directly, or through a tunnel."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf

import grpc

from swarm_protocol.dht.records import short_id
from swarm_protocol.errors import BadReply, PeerUnavailable, SwarmError
from swarm_protocol.failures import undone_on_error
from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.rpc.shared import has_result, result_of
from swarm_protocol.streams.frames import framed, read_message, write, write_message
from swarm_protocol.streams.pipe import pipe
from swarm_protocol.streams.streams import Stream, Streams
from swarm_protocol.tunnel.accepting import HELLO_TIMEOUT_S, TUNNEL
from swarm_protocol.tunnel.circuit import Circuit, is_circuit, relay_of
from swarm_protocol.tunnel.members import RelayCredentials
from swarm_protocol.tunnel.punching import PUNCH_S, hole_beside, partner
from swarm_protocol.tunnel.relaying import RELAY
from swarm_protocol.wire.printable import printable

_LOCAL = "127.0.0.1"
_HEAD_START_S = 0.25  # head start of an address over the next one (RFC 8305)
_TUNNEL_S = 5.0 + PUNCH_S  # extra time for a connection through a relay, which takes several round trips
_PUNCH_AGAIN_S = 600.0  # pause after a failed attempt to connect through the routers
_logger = logging.getLogger(__name__)
_closing: set[asyncio.Future[None]] = set()


class Dialer:
    """The dialer of servers. A tunnel is a loopback port; each connection to it goes through its own stream."""

    def __init__(
        self, credentials: ClientCredentials, streams: Streams | None = None, membership: RelayCredentials | None = None
    ) -> None:
        """Set the credentials; without ``streams``, servers are reached directly or not at all."""
        self._credentials = credentials
        self._streams = streams
        self._membership = membership or RelayCredentials()
        self._ports: dict[str, asyncio.Task[_TunnelPort]] = {}
        self._waiting = Counter[str]()  # by address: callers that wait for this port
        self._not_before_s: dict[str, float] = {}  # by server: when to try the routers again

    async def connect(
        self, address: str, fingerprint: bytes, options: Sequence[tuple[str, object]], timeout_s: float
    ) -> grpc.aio.Channel:
        """Connect like ``pinned_channel``; ``address`` is HOST:PORT or a circuit."""
        if not is_circuit(address):
            return await pinned_channel(self._credentials, address, fingerprint, options, timeout_s)
        self._waiting[address] += 1
        try:
            port = await self._port(address)
            try:
                local = f"{_LOCAL}:{port.number}"
                channel = await pinned_channel(self._credentials, local, fingerprint, options, timeout_s + _TUNNEL_S)
            except PeerUnavailable as error:
                raise PeerUnavailable(port.failure or str(error), port.circuit.target) from None
            port.lead()
            return channel
        finally:
            self._waiting -= Counter([address])  # which drops an address that nobody waits for
            self._close_unused(address)

    def relay_of(self, address: str) -> str:
        """Return the relay that carries connections to this address now; empty if they bypass it, or there is none."""
        port = self._ports.get(address)
        is_past = port is not None and has_result(port) and port.result().is_past_relay
        return "" if is_past else relay_of(address)

    async def close(self) -> None:
        ports, self._ports = self._ports, {}
        for opening in ports.values():
            opening.cancel()
            with suppress(asyncio.CancelledError, SwarmError, OSError):
                (await opening).close()

    def _close_unused(self, address: str) -> None:
        """Close a port that is no longer used; called whenever one of its users has ended."""
        opening = self._ports.get(address)
        if opening is None or not opening.done() or address in self._waiting:
            return
        if not has_result(opening):
            del self._ports[address]
        elif opening.result().is_unused:
            opening.result().close()
            del self._ports[address]

    async def _port(self, address: str) -> _TunnelPort:
        if self._streams is None:
            raise PeerUnavailable("the server is reached through a relay, and there is no libp2p daemon here")
        try:
            circuit = Circuit.parse(address)
        except ValueError as error:
            raise PeerUnavailable(f"no server answers at {printable(address, 80)}: {error}") from None
        if address not in self._ports:
            on_end = partial(self._close_unused, address)
            port = _TunnelPort(circuit, self._streams, self._membership, self._not_before_s, on_end)
            self._ports[address] = asyncio.ensure_future(port.open())
            self._ports[address].add_done_callback(lambda _: on_end())  # the caller that requested it may be gone
        opening = self._ports[address]
        try:
            return await result_of(opening, circuit.target)
        except OSError as error:
            if self._ports.get(address) is opening:
                del self._ports[address]
            raise PeerUnavailable(f"no tunnel can be opened: {error}", circuit.target) from None


class _TunnelPort:
    """A loopback port whose connections lead to one server. Any process may use it: TLS proves who a caller is.

    Attributes:
        failure: why the last tunnel could not be opened; empty if it was opened.
        is_past_relay: whether the tunnel goes directly through both peers' routers, without the relay.
        has_led: whether the port has led to the server, so that channels through it may exist that connect on use.
    """

    def __init__(
        self,
        circuit: Circuit,
        streams: Streams,
        membership: RelayCredentials,
        not_before_s: MutableMapping[str, float],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Set the circuit; ``not_before_s``: by server peer id, when to try the routers again.

        ``on_end`` is called whenever a connection has ended.
        """
        self.circuit = circuit
        self.failure, self.is_past_relay, self.has_led = "", False, False
        self.number = 0
        self._streams, self._membership = streams, membership
        self._connections: set[asyncio.Task[None]] = set()
        self._punching, self._not_before_s = asyncio.Lock(), not_before_s
        self._on_end = on_end

    async def open(self) -> _TunnelPort:
        self._server = await asyncio.start_server(self._take, _LOCAL, 0)
        self.number = self._server.sockets[0].getsockname()[1]
        return self

    def lead(self) -> None:
        """Note that the port has led to the server."""
        self.has_led = True

    @property
    def is_unused(self) -> bool:
        return not (self.has_led or self._connections)

    def close(self) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            stream = await self._opened()
            self.failure = ""
            await pipe(reader, writer, stream)
        except (SwarmError, OSError) as error:
            self.failure = f"no way through relay {self.circuit.relay_id[-6:]}: {printable(str(error), 200)}"
            _logger.info("%s", self.failure)
        except asyncio.CancelledError:
            pass  # the dialer was closed; asyncio would log it
        finally:
            self._connections.discard(task)
            writer.transport.abort()
            self._on_end()

    async def _opened(self) -> Stream:
        """Open a stream to the server's gRPC port, through both routers if possible, else through the relay."""
        if not self.circuit.is_direct:
            async with self._punching:  # so that the next connection knows the result
                now_s = asyncio.get_running_loop().time()
                if now_s >= self._not_before_s.get(self.circuit.target, -inf):
                    stream, self.is_past_relay = await open_punched(self._streams, self.circuit, self._membership)
                    if stream is not None:
                        return stream
                    self._not_before_s[self.circuit.target] = now_s + _PUNCH_AGAIN_S
                self.is_past_relay = False
        return await open_tunnel(self._streams, self.circuit, self._membership)


async def open_tunnel(streams: Streams, circuit: Circuit, membership: RelayCredentials) -> Stream:
    """Open a stream that leads to the server's gRPC port; raise PeerUnavailable if that fails."""
    stream = await _stream(streams, circuit)
    await _ask(stream, streams, circuit, membership)
    return stream


async def open_punched(streams: Streams, circuit: Circuit, membership: RelayCredentials) -> tuple[Stream | None, bool]:
    """Open a stream like ``open_tunnel``, directly through both peers' routers if the server agrees.

    Returns the stream, None if punching failed, and whether it is direct. Raises PeerUnavailable.
    """
    stream = await _stream(streams, circuit)
    hole = hole_beside(stream.host) if circuit.relay_id != streams.peer_id else None
    if hole is None:
        await _ask(stream, streams, circuit, membership)
        return stream, False
    with hole:
        start_s = time.perf_counter()
        answer = await _ask(stream, streams, circuit, membership, hole.port)
        if not answer.port:
            return stream, False
        rtt_s = time.perf_counter() - start_s
        met, direct = partner(answer.host, answer.port, stream.host), None
        try:
            if met is not None:
                await write(stream.writer, framed(b""))
                await asyncio.sleep(rtt_s / 2)  # the server begins when this message arrives
                direct = await hole.through(circuit.target, *met)
        except OSError as error:
            raise PeerUnavailable(f"the tunnel was not opened: {error}", circuit.target) from None
        finally:
            stream.close()
    result = "connected directly, through the routers of both" if direct else "only reached through its relay"
    _logger.info("%s is %s", short_id(circuit.target), result)
    return direct, direct is not None


async def _stream(streams: Streams, circuit: Circuit) -> Stream:
    if circuit.relay_id == streams.peer_id:  # this peer is the relay, and has a connection to the server
        return await streams.open(circuit.target, TUNNEL)
    return await streams.open(circuit.relay, TUNNEL if circuit.is_direct else RELAY)


async def _ask(
    stream: Stream, streams: Streams, circuit: Circuit, membership: RelayCredentials, port: int = 0
) -> pb.Opened:
    """Return the server's answer to a tunnel, or to a punched connection from ``port``.

    The stream is closed on refusal. Raises PeerUnavailable.
    """
    with undone_on_error(stream.abort):
        try:
            member = pb.Member() if circuit.is_direct else membership.shown(streams.peer_id, circuit.relay_id)
            await write_message(stream.writer, pb.Open(target=circuit.target, member=member, port=port))
            answer = await read_message(stream.reader, pb.Opened, HELLO_TIMEOUT_S)
        except (OSError, BadReply) as error:
            raise PeerUnavailable(f"the tunnel was not opened: {error}", circuit.target) from None
    if answer.refusal:
        stream.close()
        raise PeerUnavailable(answer.refusal, circuit.target)
    return answer


async def first_reached(
    addresses: Sequence[str], connect: Callable[[str], Awaitable[grpc.aio.Channel]], *, keeps: bool = False
) -> tuple[str, grpc.aio.Channel]:
    """Return the first address at which the server answers; attempts start one by one with a short head start each.

    Direct addresses come first. Other channels are closed, unless the caller ``keeps`` them for later.

    Raises:
        PeerUnavailable or BadReply: no address leads to the server; the type is that of the first failure.
    """
    waiting = sorted(addresses, key=is_circuit)  # a stable sort: otherwise the server's order
    if not waiting:
        raise PeerUnavailable("it announces no address")
    trying: dict[asyncio.Future[grpc.aio.Channel], str] = {}
    failures: list[SwarmError] = []
    try:
        while waiting or trying:
            if waiting:
                address = waiting.pop(0)
                trying[asyncio.ensure_future(connect(address))] = address
            done, _ = await asyncio.wait(
                trying, timeout=_HEAD_START_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                address = trying.pop(attempt)
                try:
                    return address, attempt.result()
                except (PeerUnavailable, BadReply) as error:
                    failures.append(error)
    finally:
        for attempt in trying:
            attempt.cancel()
            if not keeps:
                attempt.add_done_callback(_close_unneeded)
    raise type(failures[0])("; ".join(dict.fromkeys(map(str, failures))))


def _close_unneeded(attempt: asyncio.Future[grpc.aio.Channel]) -> None:
    if has_result(attempt):
        closing = asyncio.ensure_future(attempt.result().close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
