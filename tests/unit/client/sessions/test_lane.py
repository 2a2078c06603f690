"""Lanes of a session: what they know when several become one, and whether they wait for room."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from swarm_client.adapters.snapshots import AdapterSnapshot
from swarm_client.core.background import now_s
from swarm_client.core.events import Reporter
from swarm_client.sessions.lane import Lane, joined
from swarm_client.sessions.opening import LaneSettings, SessionOptions
from swarm_protocol.errors import PeerBusy, RecoveryFailed
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.worlds.fake_servers import NUM_BLOCKS, FakeServers, client_of
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)


@asynccontextmanager
async def lanes_of(servers: FakeServers, **options: Any) -> AsyncIterator[LaneSettings]:
    async with client_of(servers, **options) as swarm:
        yield LaneSettings(swarm, Span(0, NUM_BLOCKS), None, SessionOptions(8), Reporter(lambda _event: None))


async def test_a_joined_lane_has_all_rows_and_all_positions_of_each_and_their_adapter() -> None:
    async with lanes_of(FakeServers(a="0:6")) as setting:
        hidden = [torch.randn(2, 5, 4), torch.randn(1, 5, 4)]
        lanes, adapter = [Lane(setting), Lane(setting)], AdapterSnapshot()
        for lane, of_lane in zip(lanes, hidden, strict=True):
            lane.begin_with(BlockInput(of_lane), adapter)
        lane = joined(lanes, setting)
        assert lane.chain.opener.adapter is lanes[0].copy(setting).chain.opener.adapter is adapter
        rows = lane.rows
        assert (rows.batch_size, rows.length) == (3, 5)
        inputs = rows.read(0, rows.length)
        assert torch.equal(inputs.hidden, torch.cat(hidden))
        assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize(("num_rows", "room"), [(1, (0, 0)), (6, (5, 8 - 3))])
async def test_servers_are_asked_at_once_for_the_room_of_rows_that_begin_alike(
    num_rows: int, room: tuple[int, int]
) -> None:
    servers = FakeServers(a="0:6")
    async with lanes_of(servers) as setting:
        with pytest.raises(RecoveryFailed):  # the servers are asked, and compute nothing
            await Lane(setting).step(BlockInput(torch.randn(1, 3, 4).expand(num_rows, -1, -1)), 1, range(0), True)
        call = servers.calls[0]
        assert (call.request.batch_size, call.request.reserve_tokens) == (1, 8)
        assert (call.request.num_copies, call.request.copy_tokens) == room


@pytest.mark.parametrize("may_wait", [False, True])
async def test_a_step_waits_for_room_only_if_it_may(may_wait: bool) -> None:
    servers = FakeServers(a="0:6")
    async with lanes_of(servers, wait_timeout_s=50.0) as setting:
        servers.fill("a")
        start_s = now_s()
        with pytest.raises(PeerBusy):
            await Lane(setting).step(BlockInput(torch.randn(1, 3, 4)), 1, range(0), may_wait)
        assert now_s() - start_s == pytest.approx(50.0 if may_wait else 0.0, abs=1.0)
