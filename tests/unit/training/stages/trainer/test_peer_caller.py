"""A trainer that waits for the peer that may still answer, and not for one that has refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_training.core.record import Progress
from swarm_training.stages.routing.router import Router
from swarm_training.stages.rpc.answers import StageAnswer
from swarm_training.stages.rpc.client import MicroBatch, StageRequest
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.peer_caller import PeerCaller
from tests.worlds.toy_stages import RUN, START, tokens


class OneRefusesOneIsBusy:
    """Peers that a ``StagesClient`` calls: the first one refuses, the other one is busy once."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, asked: StageRequest, peer: Progress, timeout_s: float) -> StageAnswer:
        self.asked.append(peer.peer_id)
        if peer.peer_id == "a":
            raise RequestRejected("no")
        if self.asked.count("b") == 1:
            raise PeerBusy("no room", "b")
        return StageAnswer()


class NotingRouter(Router):
    """A router that notes for which peers it is asked how long to wait."""

    waited_for: list[set[str]]

    def wait_s(self, candidates: Collection[str], now: float) -> float:
        self.waited_for.append(set(candidates))
        return super().wait_s(candidates, now)


async def test_a_peer_that_has_refused_is_not_waited_for() -> None:
    """It may be asked again at once, so that the trainer would not wait at all, and its loop would do nothing else."""
    router, client = NotingRouter(lambda: 0.0), OneRefusesOneIsBusy()
    router.waited_for = []
    peers = [Progress(RUN, peer_id, address="somewhere:1") for peer_id in ("a", "b")]
    to_ask: Any = client
    caller = PeerCaller(lambda: [peers], router, TrainerConfig(), to_ask)
    _, peer = await caller.ask(StageRequest(MicroBatch(0, START, 0), tokens(0, 0)))
    assert peer.peer_id == "b" and client.asked == ["a", "b", "b"]
    assert router.waited_for and all(each == {"b"} for each in router.waited_for)
