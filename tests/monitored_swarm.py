"""A gateway's monitor over a swarm that is what a test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn

from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop
from swarm_gateway.app.app import create_app
from swarm_gateway.app.serving import listen
from swarm_gateway.history.recorder import HistoryRecorder
from swarm_gateway.history.store import HistoryStore
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import SwarmSnapshot
from swarm_gateway.monitor_api.endpoints import Monitored
from swarm_protocol.dht.records import ServerRecord, ServerState, WorkTotals
from swarm_protocol.errors import NoSwarm
from swarm_protocol.span import Span

MODEL = "some-model"
PEER = "/ip4/192.0.2.10/tcp/31331/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class FakeMonitor:
    """Sees the servers that it is given.

    Attributes:
        trouble: what every look fails with, if anything.
    """

    def __init__(
        self, *servers: ServerStatus, num_blocks: int = 20, peers: tuple[str, ...] = (PEER,), revision: str = ""
    ) -> None:
        self.servers = {server.record.peer_id: server for server in servers}
        self.num_blocks = num_blocks
        self.trouble = ""
        self._revision = revision
        self._peers = list(peers)

    def put(self, server: ServerStatus) -> None:
        self.servers = {**self.servers, server.record.peer_id: server}

    def change(self, peer_id: str, *, answers: bool = True, **fields: Any) -> None:
        old = self.servers[peer_id]
        self.put(replace(old, answers=answers, record=replace(old.record, **fields)))

    def remove(self, peer_id: str) -> None:
        self.servers = {name: server for name, server in self.servers.items() if name != peer_id}

    async def look(self) -> SwarmSnapshot:
        if self.trouble:
            raise NoSwarm(self.trouble)
        servers = sorted(self.servers.values(), key=lambda each: (each.record.span, each.record.peer_id))
        by_model: dict[str, list[ServerStatus]] = {}
        for each in servers:
            by_model.setdefault(each.record.model, []).append(each)
        return SwarmSnapshot(tuple(self._status(model, found) for model, found in by_model.items()))

    async def look_again(self, wait_s: float) -> SwarmSnapshot:
        return await self.look()

    async def peers(self) -> list[str]:
        return self._peers

    async def close(self) -> None:
        pass

    def _status(self, model: str, servers: list[ServerStatus]) -> ModelStatus:
        status = ModelStatus(model, servers[0].record.num_blocks, tuple(servers), self._revision)
        if status.missing:
            return status
        return replace(status, chain=_chain(status), tokens_per_s=9.5)


def _chain(status: ModelStatus) -> tuple[Hop, ...]:
    """Of the servers that reach farthest."""
    hops: list[Hop] = []
    at = 0
    while at < status.num_blocks:
        able = [each.record for each in status.servers if status.serves(each) and at in each.record.span]
        best = max(able, key=lambda record: record.span.end)
        hops.append(Hop(best, Span(at, best.span.end)))
        at = best.span.end
    return tuple(hops)


def server(
    name: str, blocks: str, *, num_blocks: int = 20, answers: bool = True, rtt_s: float = 0.012, **fields: Any
) -> ServerStatus:
    known = dict(
        addresses=("192.0.2.7:4001",), model=MODEL, revision="r1", tokens_per_s=42.0, cache_tokens=8192,
        cache_tokens_left=6000, queue_delay_s=0.004, quant="int8", software_version="0.1.0",
        tls_fingerprint=name.encode()[:32], work=WorkTotals(40_000, 90_000, 0, 3600.0), state=ServerState.ONLINE,
    )  # fmt: skip
    record = ServerRecord(peer_id=name, span=Span.parse(blocks), num_blocks=num_blocks, **(known | fields))
    return ServerStatus(record, rtt_s, answers)


class NoModels:
    async def names(self) -> list[str]:
        return []


@contextmanager
def monitor_served(
    monitor: Any,
    keys: tuple[str, ...] = (),
    history: HistoryStore | None = None,
    config: ClientConfig | None = None,
    own_model: str = MODEL,
) -> Iterator[str]:
    """The URL of a gateway that has no models to ask."""
    recorder = HistoryRecorder(monitor, history or HistoryStore(None))
    monitored = Monitored(recorder, config or ClientConfig(swarm="home"), own_model)
    listener = listen("127.0.0.1", 0)
    app = create_app(NoModels(), keys=keys, monitored=monitored)
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=uvicorn_server.run, args=([listener],))
    background.run(recorder.start())
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        uvicorn_server.should_exit = True
        thread.join(30)
        listener.close()
        background.run(recorder.close())
