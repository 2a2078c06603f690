"""What others say of a server that they tried to reach, between real libp2p daemons on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import read_message, write_message
from swarm_protocol.streams.streams import DaemonStreams, Stream
from swarm_protocol.tunnel.dial_back import DIAL_BACK, serve_dial_back
from swarm_server.core.config import ServerConfig
from swarm_server.reach import reach as module
from swarm_server.reach.own_addresses import OwnAddresses
from swarm_server.reach.reach import Reach, can_be_reached
from tests.quick_keys import new_identity
from tests.swarm.waiting import DEADLINE_S

LOCAL, LAN = "127.0.0.1", "192.168.1.10"


async def denies(stream: Stream, host: str = LOCAL) -> None:
    """Reaches nothing, says a member that sees the server come from this address."""
    await read_message(stream.reader, pb.DialBack, DEADLINE_S)
    await write_message(stream.writer, pb.DialedBack(host=host))


Member = Callable[[Stream], Awaitable[None]] | None  # None: honest


@asynccontextmanager
async def first_server(monkeypatch: pytest.MonkeyPatch, *members: Member) -> AsyncIterator[tuple[Reach, Dht]]:
    """One that announces its address, and members that have joined through it, which answer like this."""
    monkeypatch.setattr(module, "is_loopback", lambda _: False)
    async with AsyncExitStack() as stack:

        async def joined(*peers: str) -> tuple[Dht, DaemonStreams]:
            dht = await Dht.join("dialled", peers, new_identity(), Listening(LOCAL))
            stack.push_async_callback(dht.shutdown)
            return dht, DaemonStreams(lambda: dht.p2p)

        dht, streams = await joined()
        (peer,) = await dht.addresses()
        addresses = []
        for answers in members:
            member, theirs = await joined(peer)
            await (serve_dial_back(theirs) if answers is None else theirs.serve(DIAL_BACK, answers))
            addresses += await member.addresses()
        listening = await asyncio.start_server(lambda _, writer: writer.close(), LOCAL, 0)
        stack.callback(listening.close)
        own = OwnAddresses(LOCAL, LOCAL, False, [])
        own.port = listening.sockets[0].getsockname()[1]
        config = ServerConfig(model="none", announce_address=LOCAL)
        reach = Reach(config, SwarmAccess(new_identity()), dht, streams, own, lambda: addresses)
        await reach.start()
        stack.push_async_callback(reach.close)
        yield reach, dht


async def nobody() -> list[str]:
    return []


async def can_be_joined(dht: Dht) -> bool:
    newcomer = await Dht.join("dialled", await dht.addresses(), new_identity())
    await newcomer.shutdown()
    return True


def run(check: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


def test_one_member_that_denies_it_takes_no_server_out_of_the_swarm(monkeypatch):
    async def check() -> None:
        async with first_server(monkeypatch, None, None, denies) as (reach, dht):
            await reach._look(nobody)
            assert reach._wants_relays and reach.relay.offers and dht.serves_others
            assert await can_be_joined(dht)

    run(check)


def test_whoever_has_come_by_the_local_network_has_not_tried(monkeypatch):
    async def check() -> None:
        async with first_server(monkeypatch, partial(denies, host=LAN)) as (reach, dht):
            await reach._look(nobody)
            assert reach.relay.offers and not reach._wants_relays
            assert await can_be_reached(dht.p2p, reach._members(), LOCAL)  # as when it starts again
            assert not await can_be_reached(dht.p2p, reach._members())
            assert await can_be_joined(dht)

    run(check)
