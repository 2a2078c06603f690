"""Lanes of a session: what they know when several become one, and whether they wait for room."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from swarm_client.adapters.snapshots import AdapterSnapshot
from swarm_client.core.background import now_s
from swarm_client.core.events import Reporter
from swarm_client.sessions.lane import Lane, joined
from swarm_client.sessions.opening import LaneSettings, SessionOptions
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.errors import PeerBusy, RecoveryFailed
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.worlds.fake_servers import NUM_BLOCKS, FakeServers, play


def lanes_of(servers: FakeServers, story: Callable[[LaneSettings], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def scenario(swarm: Swarm) -> None:
        await story(LaneSettings(swarm, Span(0, NUM_BLOCKS), None, SessionOptions(8), Reporter(lambda _event: None)))

    play(servers, scenario, **options)


def test_a_joined_lane_has_all_rows_and_all_positions_of_each_and_their_adapter() -> None:
    async def story(setting: LaneSettings) -> None:
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

    lanes_of(FakeServers(a="0:6"), story)


@pytest.mark.parametrize(("num_rows", "room"), [(1, (0, 0)), (6, (5, 8 - 3))])
def test_servers_are_asked_at_once_for_the_room_of_rows_that_begin_alike(num_rows: int, room: tuple[int, int]) -> None:
    servers = FakeServers(a="0:6")

    async def story(setting: LaneSettings) -> None:
        with pytest.raises(RecoveryFailed):  # the servers are asked, and compute nothing
            await Lane(setting).step(BlockInput(torch.randn(1, 3, 4).expand(num_rows, -1, -1)), 1, range(0), True)
        call = servers.calls[0]
        assert (call.request.batch_size, call.request.reserve_tokens) == (1, 8)
        assert (call.request.num_copies, call.request.copy_tokens) == room

    lanes_of(servers, story)


@pytest.mark.parametrize("may_wait", [False, True])
def test_a_step_waits_for_room_only_if_it_may(may_wait: bool) -> None:
    servers = FakeServers(a="0:6")

    async def story(setting: LaneSettings) -> None:
        servers.fill("a")
        start_s = now_s()
        with pytest.raises(PeerBusy):
            await Lane(setting).step(BlockInput(torch.randn(1, 3, 4)), 1, range(0), may_wait)
        assert now_s() - start_s == pytest.approx(50.0 if may_wait else 0.0, abs=1.0)

    lanes_of(servers, story, wait_timeout_s=50.0)
