"""What a server looks at to stay within reach, without a network."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_server.core.config import ServerConfig
from swarm_server.reach import own_addresses
from swarm_server.reach.own_addresses import OwnAddresses
from swarm_server.reach.reach import Reach
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


async def test_a_name_that_is_looked_up_slowly_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    others_go_on = threading.Event()

    def source_address(_host: str) -> str:
        assert others_go_on.wait(10.0), "the event loop waits for the look-up"
        return OWN

    async def nobody() -> list[str]:
        return []

    monkeypatch.setattr(own_addresses, "source_address", source_address)
    streams: Any = None
    dht: Any = FakeDht()
    own = OwnAddresses(OWN, None, True, [NAMED])
    reach = Reach(ServerConfig(model="none"), SwarmAccess(identity(0)), dht, streams, own, list)
    asyncio.get_running_loop().call_soon(others_go_on.set)
    await reach._look(nobody)
