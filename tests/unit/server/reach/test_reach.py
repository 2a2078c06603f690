"""What a server looks at to stay within reach, without a network."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.errors import PeerBusy
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_server.core.config import ServerConfig
from swarm_server.reach import own_addresses
from swarm_server.reach import reach as reach_module
from swarm_server.reach.own_addresses import OwnAddresses
from swarm_server.reach.reach import Reach, can_be_reached
from tests.unit.support import until
from tests.worlds.identities import identity

OWN, PEER_ID = "192.0.2.1", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
NAMED = f"/dns4/swarm.example.org/tcp/31330/p2p/{PEER_ID}"


class FakeDht:
    """A node that knows nobody."""

    def __init__(self) -> None:
        self.peer_id, self.serves_others = "own", True

    def serve_others(self, serves: bool) -> None:
        self.serves_others = serves

    async def addresses(self) -> list[str]:
        return [f"/ip4/{OWN}/tcp/1/p2p/{PEER_ID}"]

    async def peers(self) -> list[str]:
        return []


async def nobody() -> list[str]:
    return []


def reach_of(dht: Any, own: OwnAddresses, *members: str, **config: str) -> Reach:
    streams: Any = None
    return Reach(ServerConfig(model="none", **config), SwarmAccess(identity(0)), dht, streams, own, lambda: members)


YES, NO = pb.DialedBack(reached=[f"{OWN}:7", f"{OWN}:1"], host=OWN), pb.DialedBack(host=OWN)
NEVER_TRIED = pb.DialedBack(host="192.168.1.10")  # a member that sees the server come from the local network


@pytest.mark.parametrize(
    ("said", "wants_relays", "serves_others", "can_start_again"),
    [([YES, YES, NO], True, True, False), ([NEVER_TRIED], False, True, True), ([NO, NO, YES], True, False, False)],
)
async def test_one_member_that_denies_it_takes_no_server_out_of_the_swarm(
    said: list[pb.DialedBack],
    wants_relays: bool,
    serves_others: bool,
    can_start_again: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = [f"/ip4/192.0.2.{number}/tcp/1/p2p/{identity(number).peer_id}" for number in range(10, 10 + len(said))]

    async def asked(_streams: Any, peer: str, _addresses: Any) -> pb.DialedBack:
        return said[members.index(peer)]

    async def full(*_: Any) -> None:
        raise PeerBusy("no room for another")

    async def connects(*_: Any) -> bool:
        return True

    for name, fake in (("ask_dial_back", asked), ("reserve", full), ("connects", connects)):
        monkeypatch.setattr(reach_module, name, fake)
    own = OwnAddresses(OWN, OWN, False, [])
    own.port = 7
    dht = FakeDht()
    reach = reach_of(dht, own, *members, announce_address=OWN)
    await reach._look(nobody)
    assert (reach._wants_relays, dht.serves_others, reach.relay.offers) == (wants_relays, serves_others, serves_others)
    p2p: Any = SimpleNamespace(get_visible_maddrs=dht.addresses)
    assert await can_be_reached(p2p, members, OWN) is can_start_again


async def test_a_publication_that_fails_does_not_end_the_upkeep(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published = 0

    class MovingDht(FakeDht):
        async def addresses(self) -> list[str]:
            own.port += 1
            return await super().addresses()

    async def publish() -> None:
        nonlocal published
        published += 1
        if published == 1:
            raise ConnectionResetError("the daemon is gone")

    monkeypatch.setattr(reach_module, "_LOOK_S", 0.0)
    own = OwnAddresses(OWN, OWN, False, [])
    own.port = 7
    keeping = asyncio.ensure_future(reach_of(MovingDht(), own).keep(publish, nobody))
    await until(lambda: published > 1 or keeping.done())
    keeping.cancel()
    await asyncio.wait([keeping])
    assert published > 1 and "was not told of this server's new addresses" in caplog.text


async def test_a_name_that_is_looked_up_slowly_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    others_go_on = threading.Event()

    def source_address(_host: str) -> str:
        assert others_go_on.wait(10.0), "the event loop waits for the look-up"
        return OWN

    monkeypatch.setattr(own_addresses, "source_address", source_address)
    reach = reach_of(FakeDht(), OwnAddresses(OWN, None, True, [NAMED]))
    asyncio.get_running_loop().call_soon(others_go_on.set)
    await reach._look(nobody)
