"""How long a node waits for peers that do not answer."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

import pytest

from swarm_protocol.dht import bootstrap
from swarm_protocol.dht.addresses import require_answer
from swarm_protocol.errors import NoSwarm
from tests.worlds.virtual_time import run_virtually

TIMEOUT_S = 30.0
PEER = "/ip4/127.0.0.1/tcp/1/p2p/somebody"


async def test_a_peer_that_only_libp2p_can_try_may_answer(recwarn: pytest.WarningsRecorder) -> None:
    gc.collect()  # what earlier tests have left
    recwarn.clear()
    peer_id = "QmNLfbof5rLekrACjeuLk9JmGZD2HDBHCU4z16iYKmx5SE"
    await require_answer([f"/ip4/127.0.0.1/udp/1/quic/p2p/{peer_id}", f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}"])
    gc.collect()
    assert not recwarn.list, "a coroutine was never awaited"


class UnansweredNode:
    """A node whose initial peers do not answer, and to whom libp2p has no connection."""

    def __init__(self) -> None:
        self.protocol = SimpleNamespace(wait_timeout=3.0)
        self.p2p = self

    async def list_peers(self) -> list[object]:
        return []


class NodeWithoutDaemon(UnansweredNode):
    """A node whose own daemon was killed while it joined."""

    async def list_peers(self) -> list[object]:
        raise ConnectionRefusedError


def test_a_node_that_loses_its_daemon_meanwhile_has_no_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody_answers(*_: object, **_options: object) -> bool:
        return False

    monkeypatch.setattr(bootstrap, "bootstrap", nobody_answers)
    with pytest.raises(NoSwarm, match=PEER):
        run_virtually(bootstrap._join(NodeWithoutDaemon(), [PEER], TIMEOUT_S, lambda: False, lambda _: None))


@pytest.mark.parametrize("lives_s", [0.0, 2.0, 100.0])
def test_a_peer_that_ends_is_waited_for_no_longer(lives_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody_answers(*_: object, **_options: object) -> bool:
        await asyncio.sleep(0.1)
        return False

    monkeypatch.setattr(bootstrap, "bootstrap", nobody_answers)
    said: list[float] = []

    async def joining() -> float:
        clock = asyncio.get_running_loop().time
        with pytest.raises(NoSwarm, match=PEER):
            await bootstrap._join(UnansweredNode(), [PEER], TIMEOUT_S, lambda: clock() < lives_s, said.append)
        return clock()

    took_s = run_virtually(joining())
    expected_s = min(lives_s, TIMEOUT_S)
    assert expected_s <= took_s + 0.5 and took_s <= expected_s + 0.5
    assert len(said) == (lives_s > 0)
