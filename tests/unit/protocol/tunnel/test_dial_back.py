"""Dialling back, over streams in memory: which addresses a stranger has others try, and what it hears of its own."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import framed, read_message
from swarm_protocol.tunnel import dial_back
from swarm_protocol.tunnel.accepting import HELLO_TIMEOUT_S
from swarm_protocol.tunnel.dial_back import DIAL_BACK, ask_dial_back, serve_dial_back
from tests.unit.protocol.tunnel.test_relay_ends import MemoryStreams, stream_of

NAMES = {"me.example": ["192.0.2.1", "2001:db8::1"], "odd.example": ["192.0.2.9"]}


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were looked up."""
    names: list[str] = []

    async def getaddrinfo(_loop: object, host: str, *_: object, **__: object) -> list[Any]:
        names.append(host)
        if host not in NAMES:
            raise OSError("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, 0)) for ip in NAMES[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return names


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The addresses that were tried; each of them answers."""
    targets: list[tuple[str, int]] = []

    async def connects(host: str, port: int) -> bool:
        targets.append((host, port))
        return True

    monkeypatch.setattr(dial_back, "connects", connects)
    return targets


async def test_a_strangers_names_are_not_looked_up(looked_up: list[str], dialled: list[tuple[str, int]]) -> None:
    streams = MemoryStreams()
    await serve_dial_back(streams)
    stream, writer = stream_of("stranger", "192.0.2.1")
    asked = ["me.example:7", "192.0.2.1:7", "192.0.2.9:7", "[::ffff:192.0.2.1]:8"]
    stream.reader.feed_data(framed(pb.DialBack(addresses=asked).SerializeToString()))
    await streams.handlers[DIAL_BACK](stream)
    answer = await read_message(writer.written, pb.DialedBack, HELLO_TIMEOUT_S)
    assert answer == pb.DialedBack(reached=["192.0.2.1:7", "[::ffff:192.0.2.1]:8"], host="192.0.2.1")
    assert looked_up == [] and dialled == [("192.0.2.1", 7), ("192.0.2.1", 8)]


class Peer(MemoryStreams):
    """A peer that reaches ``answered``, and keeps what it was ``asked``."""

    def __init__(self, *answered: str) -> None:
        super().__init__()
        self.answered, self.asked = answered, list[str]()

    async def open(self, peer: str, protocol: str) -> Any:
        stream, writer = stream_of(peer)
        answer = pb.DialedBack(reached=self.answered, host="192.0.2.1")
        stream.reader.feed_data(framed(answer.SerializeToString()))
        self.opened.append((stream, writer))
        return stream

    async def said(self, *addresses: str) -> pb.DialedBack | None:
        answer = await ask_dial_back(self, "peer", addresses)
        for _, writer in self.opened:
            self.asked = list((await read_message(writer.written, pb.DialBack, HELLO_TIMEOUT_S)).addresses)
        return answer


@pytest.mark.usefixtures("looked_up")
async def test_a_peer_looks_up_its_own_name_before_it_asks() -> None:
    peer = Peer("192.0.2.1:7", "198.51.100.1:1")
    answer = await peer.said("me.example:7", "192.0.2.1:8")
    assert peer.asked == ["192.0.2.1:7", "192.0.2.1:8", "[2001:db8::1]:7"]
    assert answer == pb.DialedBack(reached=["me.example:7"], host="192.0.2.1")
    unknown = Peer()
    assert await unknown.said("nobody.example:7") is None and not unknown.opened
