"""Real servers on loopback, inside the process of the test."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from swarm_client.core import background
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.describing import describe
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.failures import Closing
from swarm_protocol.process.local_registry import LocalRegistry
from swarm_protocol.span import Span
from swarm_server.core.config import ServerConfig
from swarm_server.node.server import Server
from tests.quick_keys import new_identity
from tests.swarm.raw_client import RawClient
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.worlds.memory_dht import forget, hold_in_memory
from tests.zoo import BLOCKS

_numbers = itertools.count()


class InProcessServers(Closing):
    """Servers of one private swarm on the event loop of this process (grpc.aio wants all its traffic on one loop).

    Each has its own DHT node, libp2p daemon and gRPC port; blocks are not quantised unless a test asks for it.
    """

    def __init__(self, model: Path, cache_tokens: int = 2048, *, memory_dht: bool = False) -> None:
        """``memory_dht``: the DHT is in the memory of this process, without daemons; other processes cannot join it."""
        self.model = model
        self._num_blocks = describe(ModelCheckpoint.open(model).config).num_blocks
        self.cache_tokens = cache_tokens
        self.swarm = f"test-{os.getpid()}-{next(_numbers)}"
        self._running: dict[Server, concurrent.futures.Future] = {}
        self._dht: Dht | None = None
        self._memory_dht = memory_dht
        if memory_dht:
            hold_in_memory(self.swarm)

    def start(self, *spans: str, **options: Any) -> list[Server]:
        """One more server for each span of blocks; they start at once, and are ready to serve when this returns."""
        defaults = {"model": str(self.model), "quant": "none", "throughput": 100.0, "cache_tokens": self.cache_tokens}
        configs = [
            ServerConfig(**{**defaults, "blocks": Span.parse(blocks), "swarm": self.swarm, **options})
            for blocks in spans
        ]
        servers = [Server(config) for config in configs]
        running = {server: background.submit(server.run()) for server in servers}
        self._running |= running
        wait_for(
            lambda: all(server.ready or future.done() for server, future in running.items()),
            f"servers of blocks {', '.join(spans)} are ready",
        )
        for server, future in running.items():
            if future.done():
                del self._running[server]
                future.result()
        return servers

    def stop(self, server: Server) -> None:
        """Ends the server as SIGTERM would."""
        future = self._running.pop(server)
        background.run(_stop(server))
        future.result(DEADLINE_S)

    @property
    def initial_peers(self) -> list[str]:
        return LocalRegistry(self.swarm).read()

    def records(self) -> list[ServerRecord]:
        """What the DHT says about the servers, first blocks first."""
        return list(background.run(self.dht.view(self.model.name, self._num_blocks)).servers)

    @property
    def dht(self) -> Dht:
        """A node that only asks."""
        if self._dht is None:
            self._dht = background.run(Dht.join(self.swarm, self.initial_peers, new_identity()))
        return self._dht

    def describe(self) -> list[ServerRecord]:
        """The records of the servers in this process as they are now, asked of the servers themselves."""
        ours = {peer.rpartition("/p2p/")[2] for peer in self.initial_peers}
        records = []
        for record in self.records():
            if record.peer_id in ours:
                with RawClient(record) as client:
                    records.append(client.describe())
        return records

    def wait_until_all_room_is_free(self) -> None:
        gc.collect()  # sessions of tests before, which an error's traceback may hold in a cycle
        left: list[int] = []

        def is_free() -> bool:
            left[:] = [record.cache_tokens_left for record in self.describe()]
            return set(left) == {self.cache_tokens}

        try:
            wait_for(is_free, "all room for keys and values has come back")
        except AssertionError as error:
            raise AssertionError(f"{error}; the servers have {left} of {self.cache_tokens} tokens left") from None

    def close(self) -> None:
        for server in list(self._running):
            self.stop(server)
        if self._dht is not None:
            background.run(self._dht.shutdown())
        if self._memory_dht:
            forget(self.swarm)


async def _stop(server: Server) -> None:
    server.stop()


def records_through(peer: str, swarm: str, model: str, num_blocks: int = BLOCKS) -> list[ServerRecord]:
    """What somebody finds in the DHT who has just come by way of this member, first blocks first."""

    async def read() -> list[ServerRecord]:
        dht = await Dht.join(swarm, [peer], new_identity())
        try:
            return list((await dht.view(model, num_blocks)).servers)
        finally:
            await dht.shutdown()

    return background.run(read())


class Numbers:
    """Enough of a tokenizer for a streamer: a token's text is its number."""

    def decode(self, ids: Iterable[int], **_options: Any) -> str:
        return "".join(f" {int(token)}" for token in ids)


class Watcher(BaseStreamer):
    """Calls a function when so many new tokens have come."""

    def __init__(self, num_tokens: int, function: Callable[[], object]) -> None:
        self._left, self._function = num_tokens + 1, function  # the prompt comes first

    def put(self, _value: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self._function()

    def end(self) -> None:
        pass
