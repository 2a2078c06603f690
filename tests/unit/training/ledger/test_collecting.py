"""A collector asks other peers for the rounds that its ledger lacks, in virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.ledger.collecting import Collector
from swarm_training.ledger.ledger import Ledger, LedgerLimits
from swarm_training.pb import training_pb2 as pb
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)


class EmptyNetwork:
    """A network whose peers have no rounds. ``asked`` has the ids of those that were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def rounds(self, peer: Progress, _request: pb.RoundsRequest) -> pb.RoundsReply:
        self.asked.append(peer.peer_id)
        return pb.RoundsReply()


async def never(*_: Any) -> Any:
    raise AssertionError("there are no rounds")


async def test_a_collector_waits_until_a_peer_can_be_asked_and_the_runs_moment_is_known() -> None:
    network: Any = EmptyNetwork()
    ledger = Ledger("run", LedgerLimits(max_samples=1000))
    peers: list[Progress] = []
    newest: Moment | None = Moment(0, 5)
    collector = Collector(ledger, network, lambda: peers, lambda: newest, never, never, random.Random(0))
    collecting = asyncio.ensure_future(collector.run())
    await asyncio.sleep(10.0)
    assert not collecting.done()  # there is nobody
    peers.append(Progress("run", "unreachable"))
    await asyncio.sleep(10.0)
    assert not collecting.done() and network.asked == []
    peers.append(Progress("run", "peer", address="192.0.2.1:1"))
    newest = None
    await asyncio.sleep(10.0)
    assert not collecting.done() and network.asked == []
    newest = Moment(0, 6)
    await asyncio.sleep(3.0)
    assert network.asked == ["peer"]
    await asyncio.sleep(7200.0)
    assert 10 < len(network.asked) < 25  # soon once in about ten minutes, since there is nothing new
    collecting.cancel()


async def test_who_has_missed_a_round_asks_within_a_minute_though_nobody_had_anything_new_for_hours() -> None:
    network: Any = EmptyNetwork()
    ledger = Ledger("run", LedgerLimits(max_samples=1000))
    newest = Moment(0, 6)
    peers = [Progress("run", "peer", address="192.0.2.1:1")]
    collector = Collector(ledger, network, lambda: peers, lambda: newest, never, never, random.Random(0))
    collecting = asyncio.ensure_future(collector.run())
    await asyncio.sleep(14400.0)
    asked = len(network.asked)
    newest = Moment(0, 7)
    await asyncio.sleep(60.0)
    assert len(network.asked) > asked
    collecting.cancel()
