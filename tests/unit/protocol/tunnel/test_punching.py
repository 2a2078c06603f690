"""Connections that two peers make to each other at the same time, on this machine: here are no routers in between."""

from __future__ import annotations

import asyncio
import socket

import pytest

from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.tunnel import punching
from swarm_protocol.tunnel.accepting import hole_for
from swarm_protocol.tunnel.punching import Hole, hole_towards
from tests.unit.support import run

LOCAL = "127.0.0.1"


@pytest.mark.parametrize("first", [0, 1])
def test_two_that_connect_to_each_other_have_one_connection(first):
    """Whichever of them begins, and is refused or accepted."""

    async def check() -> None:
        with Hole(socket.AF_INET) as one, Hole(socket.AF_INET) as other:
            ways = [lambda: one.through("other", LOCAL, other.port), lambda: other.through("one", LOCAL, one.port)]
            begun = asyncio.ensure_future(ways[first]())
            await asyncio.sleep(0)
            streams = [await ways[1 - first](), await begun]
        assert None not in streams
        for here, there in (streams, streams[::-1]):
            here.writer.write(b"hello")
            await here.writer.drain()
            assert await there.reader.readexactly(5) == b"hello"
            assert here.writer.get_extra_info("sockname") == there.writer.get_extra_info("peername")
        for stream in streams:
            stream.abort()

    run(check())


def test_a_stranger_is_not_taken_for_the_peer():
    async def check() -> None:
        with Hole(socket.AF_INET) as one, Hole(socket.AF_INET) as other:
            stranger, writer = await asyncio.open_connection(LOCAL, one.port)
            waiting = asyncio.ensure_future(one.through("other", LOCAL, other.port))
            assert await stranger.read() == b""  # closed
            writer.close()
            there, here = await other.through("one", LOCAL, one.port), await waiting
        assert here is not None and there is not None
        assert here.writer.get_extra_info("peername")[1] == other.port
        here.abort(), there.abort()

    run(check())


def test_without_a_peer_there_is_no_connection_and_the_port_is_free_again(monkeypatch):
    monkeypatch.setattr(punching, "PUNCH_S", 0.05)

    async def check() -> None:
        with Hole(socket.AF_INET) as hole, socket.socket() as nobody:
            nobody.bind((LOCAL, 0))  # does not listen
            assert await hole.through("peer", LOCAL, nobody.getsockname()[1]) is None
        with socket.socket() as again:
            again.bind((LOCAL, hole.port))

    run(check())


@pytest.mark.parametrize("host", ["", "router.example.org", "127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "169.254.0.1"])
def test_towards_some_addresses_no_hole_is_made(host):
    assert hole_towards(host) is None


@pytest.mark.parametrize(
    ("own", "other", "port", "is_made"),
    [
        ("203.0.113.5", "203.0.113.6", 40000, True),
        ("203.0.113.5", "203.0.113.6", 0, False),  # the caller wants a tunnel
        ("203.0.113.5", "203.0.113.6", 70000, False),
        ("203.0.113.5", "203.0.113.5", 40000, False),  # the same router
        ("203.0.113.5", "8.8.8.8", 40000, False),  # one of them is in a network of its own
        ("203.0.113.5", "2001:db8::1", 40000, False),
        ("", "203.0.113.6", 40000, False),  # a relay that does not say
        ("203.0.113.5", "nonsense", 40000, False),
    ],
)
def test_when_a_server_agrees(own, other, port, is_made):
    hole = hole_for(own, pb.Open(caller_host=other, port=port))
    assert (hole is not None) == is_made
    if hole is not None:
        hole.close()
