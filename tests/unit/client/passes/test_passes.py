"""Micro-batches of one pass are under way together, and end together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.passes import passes
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.worlds.fake_servers import NUM_BLOCKS, FakeChannel, FakeServers, play


class Servers(FakeServers):
    """Servers that refuse one micro-batch after a second, and compute the others for ever.

    Attributes:
        begun: how many micro-batches have come.
        given_up: how many calls the client has cancelled.
    """

    begun = given_up = 0

    async def connect(self, record: ServerRecord, config: ClientConfig) -> Connection:
        return Connection(self, record, config)


class Connection(ServerConnection):
    def __init__(self, servers: Servers, record: ServerRecord, config: ClientConfig) -> None:
        super().__init__(record, FakeChannel(servers, record.peer_id), config)  # type: ignore[arg-type]
        self._servers = servers

    async def forward(self, *_: Any) -> Any:
        self._servers.begun += 1
        if self._servers.begun == 2:
            await asyncio.sleep(1.0)
            raise RequestRejected("the hidden states are odd")
        try:
            await asyncio.Event().wait()
        finally:
            self._servers.given_up += 1


def test_if_one_micro_batch_is_refused_the_others_are_given_up() -> None:
    servers = Servers(a=f"0:{NUM_BLOCKS}")

    async def story(swarm: Swarm) -> None:
        with pytest.raises(RequestRejected, match="odd"):
            await passes.forward(swarm, Span(0, NUM_BLOCKS), BlockInput(torch.zeros(4, 64, 1), None, None))
        await asyncio.sleep(1.0)
        assert (servers.begun, servers.given_up) == (4, 3)

    play(servers, story)
