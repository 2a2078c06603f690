"""Trainers find each other on a real DHT, and share steps from the same one on."""

from __future__ import annotations

import asyncio

import pytest

from swarm_protocol.dht import node as dht_node
from swarm_protocol.dht.bootstrap import bootstrap
from swarm_protocol.dht.node import Listening
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.stages.trainer import roster as roster_module
from swarm_training.stages.trainer.roster import TrainerRoster
from tests.unit.support import until
from tests.worlds.identities import identity


async def test_who_comes_waits_for_a_step_that_all_know_of_and_who_leaves_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster_module, "_RENEW_S", 0.1)
    nodes = [await dht_node.start(identity(number), Listening("127.0.0.1")) for number in range(2)]
    assert await bootstrap(nodes[1], await dht_node.addresses(nodes[0]), joins=True)
    boards = [DhtPeerRegistry(node, "toy/0", identity(number)) for number, node in enumerate(nodes)]
    first, second = (TrainerRoster(board.node, "toy", identity(number)) for number, board in enumerate(boards))
    ids = [identity(number).peer_id for number in range(2)]
    running: list[asyncio.Task[None]] = []
    try:
        assert first.trainers() == {}
        await first.enter(5)
        running.append(asyncio.ensure_future(first.run()))
        assert first.trainers() == {ids[0]: 5}
        await second.enter(6)
        assert second.trainers() == {ids[0]: 5, ids[1]: 8}
        await until(lambda: first.trainers() == second.trainers())
        await second.leave()
        await until(lambda: len(first.trainers()) == 1)
        assert first.trainers() == {ids[0]: 5}
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for board in boards:
            await board.close()
