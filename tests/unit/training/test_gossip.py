"""The exchange of progress records, where the DHT fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from swarm_training.core.signing import sign
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.identities import identity
from tests.worlds.runs import SimulatedPeer, World


@IN_VIRTUAL_TIME
@pytest.mark.parametrize("failing", ["publish", "read"])
async def test_a_call_of_the_dht_that_fails_does_not_end_the_exchange(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    peer = SimulatedPeer.make(world, 0, target=4).peer
    board, calls = peer.gossip._board, Counter[str]()
    works = getattr(board, failing)

    async def fails_once(*arguments: Any) -> Any:
        calls[failing] += 1
        if calls[failing] == 1:
            raise ConnectionResetError("the daemon is gone")
        return await works(*arguments)

    monkeypatch.setattr(board, failing, fails_once)
    other = replace(peer.own, peer_id=identity(1).peer_id)
    world.records[other.peer_id] = sign(other, identity(1))
    exchange = asyncio.ensure_future(peer.gossip.run())
    await asyncio.sleep(30.0)  # virtual
    assert not exchange.done() and calls[failing] > 1
    assert peer.own.peer_id in world.records and [each.peer_id for each in peer.table.known()] == [other.peer_id]
    assert "the daemon is gone" in caplog.text
    exchange.cancel()
    await asyncio.wait([exchange])
