"""A relay, and a server's end of tunnels, over streams in memory."""

from __future__ import annotations

import asyncio
from math import nan
from typing import Any

import pytest

from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import framed, read_message
from swarm_protocol.streams.streams import Handler, Stream
from swarm_protocol.tunnel import accepting
from swarm_protocol.tunnel.accepting import HELLO_TIMEOUT_S, TUNNEL, Acceptor
from swarm_protocol.tunnel.relaying import RELAY, RESERVE, Relay, RelayLimits
from swarm_protocol.tunnel.reserving import RelayReservation
from tests.unit.support import until
from tests.worlds.virtual_time import run_virtually

LOCAL = "127.0.0.1"


class MemoryWriter:
    """A writer that keeps what is written where a test reads it. An abort ends what comes from the other side."""

    def __init__(self, incoming: asyncio.StreamReader) -> None:
        self.written = asyncio.StreamReader()
        self.transport = self
        self.is_aborted = False
        self._incoming = incoming

    def write(self, data: bytes) -> None:
        self.written.feed_data(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def is_closing(self) -> bool:
        return self.is_aborted

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.is_aborted:
            self.is_aborted = True
            self._incoming.feed_eof()


def stream_of(peer_id: str, host: str = "") -> tuple[Stream, MemoryWriter]:
    reader = asyncio.StreamReader()
    writer: Any = MemoryWriter(reader)
    return Stream(peer_id, host, reader, writer), writer


class MemoryStreams:
    """A libp2p daemon that reaches every peer. ``opened`` has the streams to them."""

    peer_id = "own"

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.opened: list[tuple[Stream, MemoryWriter]] = []
        self.disconnected: list[str] = []

    async def open(self, peer: str, protocol: str) -> Stream:
        assert protocol == TUNNEL
        self.opened.append(stream_of(peer))
        return self.opened[-1][0]

    async def serve(self, protocol: str, handler: Handler) -> None:
        self.handlers[protocol] = handler

    async def disconnect(self, peer_id: str) -> None:
        self.disconnected.append(peer_id)


async def test_a_server_that_reserves_again_has_lost_its_tunnels_and_the_callers_notice_at_once() -> None:
    streams = MemoryStreams()
    relay = Relay(streams, RelayLimits())
    await relay.start()
    first, first_writer = stream_of("server", "192.0.2.1")
    first.reader.feed_data(framed(pb.Reserve(keepalive_s=300.0).SerializeToString()))
    reserving = asyncio.ensure_future(streams.handlers[RESERVE](first))
    assert await read_message(first_writer.written, pb.Reserved, HELLO_TIMEOUT_S) == pb.Reserved(host="192.0.2.1")

    caller, caller_writer = stream_of("caller", "192.0.2.2")
    caller.reader.feed_data(framed(pb.Open(target="server", port=40000).SerializeToString()))
    calling = asyncio.ensure_future(streams.handlers[RELAY](caller))
    await until(lambda: streams.opened)
    ((_, server_writer),) = streams.opened
    opening = await read_message(server_writer.written, pb.Open, HELLO_TIMEOUT_S)
    assert opening == pb.Open(target="server", caller="caller", caller_host="192.0.2.2", port=40000)
    assert not server_writer.is_aborted

    again, _ = stream_of("server", "192.0.2.1")
    again.reader.feed_data(framed(pb.Reserve(keepalive_s=300.0).SerializeToString()))
    await streams.handlers[RESERVE](again)
    assert streams.disconnected == ["server"] and first_writer.is_aborted and server_writer.is_aborted
    await asyncio.wait_for(asyncio.gather(reserving, calling), HELLO_TIMEOUT_S)
    assert caller_writer.is_aborted


async def test_nothing_is_left_of_a_tunnel_that_ends_after_its_server_has_left() -> None:
    streams = MemoryStreams()
    relay = Relay(streams, RelayLimits())
    await relay.start()
    server, server_writer = stream_of("server")
    server.reader.feed_data(framed(pb.Reserve(keepalive_s=300.0).SerializeToString()))
    reserving = asyncio.ensure_future(streams.handlers[RESERVE](server))
    await read_message(server_writer.written, pb.Reserved, HELLO_TIMEOUT_S)
    caller, _ = stream_of("caller")
    caller.reader.feed_data(framed(pb.Open(target="server").SerializeToString()))
    calling = asyncio.ensure_future(streams.handlers[RELAY](caller))
    await until(lambda: streams.opened)
    server.abort()
    await asyncio.wait_for(reserving, HELLO_TIMEOUT_S)
    caller.abort()
    await asyncio.wait_for(calling, HELLO_TIMEOUT_S)
    assert not relay._tunnels and not relay._servers


async def test_identities_at_one_address_do_not_take_all_reservations_of_a_relay() -> None:
    streams = MemoryStreams()
    relay = Relay(streams, RelayLimits(servers=64))
    await relay.start()
    held: list[tuple[Stream, asyncio.Task[None]]] = []

    async def refusal(peer_id: str, host: str) -> str:
        stream, writer = stream_of(peer_id, host)
        stream.reader.feed_data(framed(pb.Reserve(keepalive_s=300.0).SerializeToString()))
        held.append((stream, asyncio.ensure_future(streams.handlers[RESERVE](stream))))
        return (await read_message(writer.written, pb.Reserved, HELLO_TIMEOUT_S)).refusal

    refusals = [await refusal(f"sybil {number}", f"2001:db8::{number:x}") for number in range(64)]
    assert refusals.count("") == 56  # 7/8
    assert refusals[-1] == "this peer, or all at its address, have their share of 64 servers behind this relay already"
    assert await refusal("honest", "192.0.2.2") == ""
    for stream, _ in held:
        stream.abort()
    await asyncio.gather(*(serving for _, serving in held))
    assert await refusal("sybil again", "2001:db8::1") == ""
    held[-1][0].abort()
    await held[-1][1]


async def test_a_relay_refuses_and_says_why() -> None:
    streams, held = MemoryStreams(), []
    relay = Relay(streams, RelayLimits(servers=1, tunnels_of_caller=1))
    await relay.start()

    def ask(protocol: str, peer_id: str, request: Any) -> MemoryWriter:
        stream, writer = stream_of(peer_id)
        stream.reader.feed_data(framed(request.SerializeToString()))
        held.append((stream, asyncio.ensure_future(streams.handlers[protocol](stream))))
        return writer

    async def reserved(peer_id: str) -> str:
        writer = ask(RESERVE, peer_id, pb.Reserve(keepalive_s=300.0))
        return (await read_message(writer.written, pb.Reserved, HELLO_TIMEOUT_S)).refusal

    async def opened() -> str:
        writer = ask(RELAY, "caller", pb.Open(target="server"))
        return (await read_message(writer.written, pb.Opened, HELLO_TIMEOUT_S)).refusal

    assert await opened() == "this relay has no such server"
    assert await reserved("server") == ""
    assert await reserved("other") == "there are 1 servers behind this relay already"
    ask(RELAY, "caller", pb.Open(target="server"))
    await until(lambda: streams.opened)
    assert await opened() == "this peer has 1 tunnels through this relay already"
    relay.may_relay = lambda: False
    assert await reserved("third") == await opened() == "this member does not relay"
    for stream, _ in held:
        stream.abort()
    streams.opened[0][0].abort()
    await asyncio.wait_for(asyncio.gather(*(serving for _, serving in held)), HELLO_TIMEOUT_S)


async def test_a_relay_that_relays_no_more_lets_its_servers_go() -> None:
    streams = MemoryStreams()
    relay = Relay(streams, RelayLimits())
    await relay.start()
    server, writer = stream_of("server")
    server.reader.feed_data(framed(pb.Reserve(keepalive_s=300.0).SerializeToString()))
    serving = asyncio.ensure_future(streams.handlers[RESERVE](server))
    await read_message(writer.written, pb.Reserved, HELLO_TIMEOUT_S)
    for _ in range(2):
        server.reader.feed_data(b"+")
        assert await writer.written.readexactly(1) == b"+"
    relay.may_relay = lambda: False
    server.reader.feed_data(b"+")
    await asyncio.wait_for(serving, HELLO_TIMEOUT_S)


@pytest.mark.run_by(function=run_virtually)
async def test_an_interval_that_is_no_number_counts_as_the_shortest_one() -> None:
    streams = MemoryStreams()
    await Relay(streams, RelayLimits()).start()
    server, writer = stream_of("server")
    server.reader.feed_data(framed(pb.Reserve(keepalive_s=nan).SerializeToString()))
    serving = asyncio.ensure_future(streams.handlers[RESERVE](server))
    await read_message(writer.written, pb.Reserved, HELLO_TIMEOUT_S)
    await asyncio.sleep(1.0)
    assert not serving.done(), "the server has not been silent for three intervals"
    server.reader.feed_data(b"+")
    assert await writer.written.readexactly(1) == b"+"
    async with asyncio.timeout(4.0):
        await serving


async def test_a_caller_to_whom_no_port_can_be_opened_goes_through_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "hole_beside", lambda _relay_host: None)
    connected: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _reader, writer: connected.append(writer), LOCAL, 0)
    origins: accepting.Origins = {}
    port = server.sockets[0].getsockname()[1]
    acceptor = Acceptor(MemoryStreams(), LOCAL, port, lambda _peer_id: "8.8.4.4", origins)
    for number, caller_port in enumerate((40000, 0), 1):
        stream, writer = stream_of("relay", "9.9.9.9")
        request = pb.Open(caller="caller", caller_host="8.8.8.8", port=caller_port)
        stream.reader.feed_data(framed(request.SerializeToString()))
        taking = asyncio.ensure_future(acceptor._take(stream))
        assert await read_message(writer.written, pb.Opened, HELLO_TIMEOUT_S) == pb.Opened()
        assert list(origins.values()) == ["8.8.8.8"]
        await until(lambda number=number: len(connected) == number)
        stream.abort()
        await taking
        assert origins == {}
    for connection in connected:
        connection.close()
    server.close()


@pytest.mark.parametrize(
    ("relay_sees", "request_"),
    [("8.8.4.4", pb.Open(port=40000)), (None, pb.Open(caller="caller", caller_host="8.8.8.8", port=40000))],
    ids=["a relay names no caller", "no relay names a caller"],
)
async def test_a_peer_that_calls_for_nobody_else_is_the_caller_itself(
    relay_sees: str | None, request_: pb.Open
) -> None:
    connected: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _reader, writer: connected.append(writer), LOCAL, 0)
    origins: accepting.Origins = {}
    port = server.sockets[0].getsockname()[1]
    acceptor = Acceptor(MemoryStreams(), LOCAL, port, lambda _peer_id: relay_sees, origins)
    stream, writer = stream_of("peer", "9.9.9.9")
    stream.reader.feed_data(framed(request_.SerializeToString()))
    taking = asyncio.ensure_future(acceptor._take(stream))
    assert await read_message(writer.written, pb.Opened, HELLO_TIMEOUT_S) == pb.Opened()
    assert list(origins.values()) == ["9.9.9.9"]
    await until(lambda: connected)
    stream.abort()
    await taking
    connected[0].close()
    server.close()


@pytest.mark.run_by(function=run_virtually)
async def test_a_reservation_is_lost_at_once_when_the_relay_closes_its_stream() -> None:
    stream, writer = stream_of("relay")
    reservation = RelayReservation("/relay", 0.1, "", stream, keepalive_s=300.0)
    await asyncio.sleep(299.0)
    assert not reservation.lost.done()
    stream.reader.feed_eof()
    for _ in range(10):
        await asyncio.sleep(0)
    assert reservation.lost.done() and writer.is_aborted


@pytest.mark.run_by(function=run_virtually)
async def test_a_reservation_is_lost_when_the_relay_does_not_answer_a_sign_of_life() -> None:
    stream, writer = stream_of("relay")
    reservation = RelayReservation("/relay", 0.1, "", stream, keepalive_s=300.0)
    for _ in range(3):
        sign = await asyncio.wait_for(writer.written.readexactly(1), 301.0)
        stream.reader.feed_data(sign)
    await asyncio.sleep(300.0)
    assert not reservation.lost.done()
    await asyncio.wait_for(reservation.lost, 6.0)
    assert writer.is_aborted
