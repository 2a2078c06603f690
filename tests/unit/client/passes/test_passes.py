"""Micro-batches of one pass are under way together, and end together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.passes import passes
from swarm_client.transport.transport import ServerConnection
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.worlds.fake_servers import NUM_BLOCKS, FakeChannel, FakeServers, client_of
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)


class Servers(FakeServers):
    """Servers that refuse one micro-batch after a second, and compute the others for ever.

    Attributes:
        begun: how many micro-batches have come.
        given_up: how many calls the client has cancelled.
        dropout_seeds: those of the micro-batches.
    """

    def __init__(self, **spans: str) -> None:
        super().__init__(**spans)
        self.dropout_seeds: list[int] = []

    begun = given_up = 0

    async def connect(self, record: ServerRecord, config: ClientConfig) -> Connection:
        return Connection(self, record, config)


class Connection(ServerConnection):
    def __init__(self, servers: Servers, record: ServerRecord, config: ClientConfig) -> None:
        super().__init__(record, FakeChannel(servers, record.peer_id), config)  # type: ignore[arg-type]
        self._servers = servers

    async def forward(self, _span: Span, _wire: WireTensor, context: Context, *_: Any) -> Any:
        self._servers.begun += 1
        self._servers.dropout_seeds.append(context.dropout_seed)
        if self._servers.begun == 2:
            await asyncio.sleep(1.0)
            raise RequestRejected("the hidden states are odd")
        try:
            await asyncio.Event().wait()
        finally:
            self._servers.given_up += 1


async def test_if_one_micro_batch_is_refused_the_others_are_given_up() -> None:
    servers = Servers(a=f"0:{NUM_BLOCKS}")
    async with client_of(servers) as swarm:
        with pytest.raises(RequestRejected, match="odd"):
            await passes.forward(swarm, Span(0, NUM_BLOCKS), BlockInput(torch.zeros(4, 64, 1), None, None))
        await asyncio.sleep(1.0)
        assert (servers.begun, servers.given_up) == (4, 3)


@pytest.mark.parametrize(("dropout_seed", "num_seeds"), [(5, 4), (0, 1)])
async def test_rows_of_different_micro_batches_drop_different_elements(dropout_seed: int, num_seeds: int) -> None:
    servers = Servers(a=f"0:{NUM_BLOCKS}")
    async with client_of(servers) as swarm:
        with pytest.raises(RequestRejected, match="odd"):
            hidden = BlockInput(torch.zeros(4, 64, 1), None, None)
            await passes.forward(swarm, Span(0, NUM_BLOCKS), hidden, dropout_seed=dropout_seed)
        assert len({*servers.dropout_seeds}) == num_seeds and (0 in servers.dropout_seeds) == (dropout_seed == 0)
