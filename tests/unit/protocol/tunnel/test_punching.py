"""Connections that two peers make to each other at the same time, on this machine: here are no routers in between."""

from __future__ import annotations

import asyncio
import socket

import pytest

from swarm_protocol.tunnel import punching
from swarm_protocol.tunnel.punching import Hole, hole_beside, partner

LOCAL = "127.0.0.1"


@pytest.mark.parametrize("first", [0, 1])
async def test_two_that_connect_to_each_other_have_one_connection(first):
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


async def test_a_stranger_is_not_taken_for_the_peer():
    with Hole(socket.AF_INET) as one, Hole(socket.AF_INET) as other:
        stranger, writer = await asyncio.open_connection(LOCAL, one.port)
        waiting = asyncio.ensure_future(one.through("other", LOCAL, other.port))
        assert await stranger.read() == b""  # closed
        writer.close()
        there, here = await other.through("one", LOCAL, one.port), await waiting
    assert here is not None and there is not None
    assert here.writer.get_extra_info("peername")[1] == other.port
    here.abort(), there.abort()


async def test_without_a_peer_there_is_no_connection_and_the_port_is_free_again(monkeypatch):
    monkeypatch.setattr(punching, "PUNCH_S", 0.05)
    with Hole(socket.AF_INET) as hole, socket.socket() as nobody:
        nobody.bind((LOCAL, 0))  # does not listen
        assert await hole.through("peer", LOCAL, nobody.getsockname()[1]) is None
    with socket.socket() as again:
        again.bind((LOCAL, hole.port))


async def test_what_this_machine_has_against_it_is_no_error(monkeypatch):
    monkeypatch.setattr(punching, "PUNCH_S", 0.05)
    with Hole(socket.AF_INET) as hole:
        assert await hole.through("peer", "2001:db8::1", 40000) is None  # another family than the hole's


@pytest.mark.parametrize("host", ["", "router.example.org", "127.0.0.1", "::1"])
def test_beside_a_relay_on_this_machine_no_hole_is_made(host):
    assert hole_beside(host) is None


@pytest.mark.parametrize(
    ("host", "port", "relay", "is_met"),
    [
        ("8.8.8.8", 40000, "9.9.9.9", True),
        ("::ffff:8.8.8.8", 40000, "9.9.9.9", True),
        ("192.168.7.2", 40000, "192.168.7.1", True),  # all are in one network
        ("8.8.8.8", 0, "9.9.9.9", False),
        ("8.8.8.8", 65536, "9.9.9.9", False),
        ("192.168.7.2", 40000, "9.9.9.9", False),  # a relay on the internet names something at home
        ("8.8.8.8", 40000, "192.168.7.1", False),
        ("2001:4860:4860::8888", 40000, "9.9.9.9", False),
        ("127.0.0.1", 40000, "192.168.7.1", False),
        ("0.0.0.0", 40000, "192.168.7.1", False),
        ("169.254.169.254", 40000, "192.168.7.1", False),
        ("224.0.0.1", 40000, "224.0.0.2", False),
        ("router.example.org", 40000, "9.9.9.9", False),
        ("8.8.8.8", 40000, "", False),
    ],
)
def test_where_a_peer_may_be(host, port, relay, is_met):
    assert (partner(host, port, relay) is not None) == is_met


def test_a_partner_is_an_address_and_nothing_that_a_resolver_sees():
    assert partner("[8.8.8.8%x.example.org]", 40000, "9.9.9.9") in (None, ("8.8.8.8", 40000))
