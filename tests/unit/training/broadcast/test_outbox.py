"""Statements that wait to be told to one peer, in virtual time."""

from __future__ import annotations

import asyncio

from swarm_protocol.errors import PeerUnavailable
from swarm_training.broadcast.outbox import BroadcastOutbox
from swarm_training.pb import training_robust_pb2 as pb
from tests.worlds.virtual_time import run_virtually


def test_statements_are_told_soon_and_in_order_though_the_peer_is_away_for_a_while() -> None:
    told: list[pb.Statement] = []
    is_away = False

    async def tell(request: pb.TellRequest) -> None:
        if is_away:
            raise PeerUnavailable("connection refused")
        told.extend(request.statements)

    async def scenario() -> None:
        nonlocal is_away
        outbox = BroadcastOutbox(tell)
        statements = [pb.Statement(content=bytes([number])) for number in range(4)]
        for number in range(2):
            await asyncio.sleep(60.0)  # the outbox is empty, and waits
            outbox.put(statements[number])
            await asyncio.sleep(1.0)
            assert told == statements[: number + 1]
        is_away = True
        outbox.put(statements[2])
        await asyncio.sleep(10.0)
        outbox.put(statements[3])
        assert told == statements[:2]
        is_away = False
        await asyncio.sleep(1.0)
        assert told == statements
        outbox.close()

    run_virtually(scenario())
