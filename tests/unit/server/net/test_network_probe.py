"""How many bytes per second a server finds that pass, in virtual time: over lines from slow to fast, near and far; and
how many servers it asks for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from swarm_protocol.dht.records import ServerRecord, SwarmView
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.net.network_probe import MAX_ANNOUNCED, MeasuredLink, NetworkProbe
from tests.unit.support import server_record
from tests.worlds.virtual_time import run_virtually

OWN, OTHER = server_record("own", "0:4"), server_record("other", "4:8")
VIEW = SwarmView((OWN, OTHER))
MBIT = 125e3


class Line:
    """To another server. ``delays_s``: of its first messages, besides."""

    def __init__(self, bytes_per_s: float, rtt_s: float = 0.05, delays_s: Sequence[float] = ()) -> None:
        self.bytes_per_s, self.rtt_s, self.delays_s = bytes_per_s, rtt_s, list(delays_s)
        self.is_gone = False
        self.sizes: list[int] = []

    async def stub(self, _server: object) -> Line:
        if self.is_gone:
            raise PeerUnavailable("gone")
        return self

    async def Echo(self, request: pb.EchoRequest, timeout: float) -> pb.EchoReply:
        size_bytes = max(len(request.payload), request.reply_bytes)
        self.sizes.append(size_bytes)
        seconds = self.rtt_s + size_bytes / self.bytes_per_s + (self.delays_s.pop(0) if self.delays_s else 0.0)
        await asyncio.sleep(min(seconds, timeout))
        if seconds > timeout:
            raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata())
        return pb.EchoReply()


def measured(line: Line, rounds: int = 1) -> NetworkProbe:
    async def story() -> NetworkProbe:
        probe = NetworkProbe(line)  # type: ignore[arg-type]
        loop: Any = asyncio.get_running_loop()
        with patch.object(time, "perf_counter", loop.time):
            for _ in range(rounds):
                await probe.measure(VIEW, OWN)
        return probe

    return run_virtually(story())


@pytest.mark.parametrize("rtt_s", [0.001, 0.3])
@pytest.mark.parametrize("mbit", [0.05, 0.3, 0.6, 1, 10, 100, 1000])
def test_a_line_is_measured_whatever_it_is_like(mbit: float, rtt_s: float) -> None:
    assert measured(Line(mbit * MBIT, rtt_s)).bytes_per_s == pytest.approx(mbit * MBIT, rel=1e-3)


def test_a_slow_line_is_not_filled() -> None:
    """Nor measured in every round."""
    line = Line(0.6 * MBIT)
    measured(line, rounds=5)
    assert max(line.sizes) == 16 * 1024 and sum(line.sizes) <= 4 * 16 * 1024


def test_a_line_over_which_nothing_comes_in_time_is_that_slow_at_most() -> None:
    line = Line(0.01 * MBIT)
    assert 0 < measured(line, rounds=5).bytes_per_s < 0.02 * MBIT
    assert sum(line.sizes) <= 2 * 16 * 1024


@pytest.mark.parametrize("slow", range(8))
def test_a_message_that_is_held_up_changes_nothing(slow: int) -> None:
    """The first one tells the round trip; then each size is sent twice, in both directions, beside round trips."""
    line = Line(10 * MBIT, delays_s=[0.0] * slow + [0.2])
    assert measured(line).bytes_per_s == pytest.approx(10 * MBIT, rel=1e-3)


def test_who_does_not_answer_says_nothing() -> None:
    line = Line(MBIT)
    line.is_gone = True
    assert measured(line).bytes_per_s == 0


@pytest.mark.run_by(function=run_virtually)
async def test_in_a_large_swarm_few_others_are_compared_with_the_nearest() -> None:
    """All have their turn, and a nearer one is found; each takes a connection meanwhile."""
    lines = {f"other{number}": Line(100 * MBIT, rtt_s=0.1) for number in range(40)}
    lines["other7"].rtt_s = 0.01
    asked: list[set[str]] = []

    class Lines:
        async def stub(self, server: ServerRecord) -> Line:
            asked[-1].add(server.peer_id)
            return lines[server.peer_id]

    probe = NetworkProbe(Lines())  # type: ignore[arg-type]
    view = SwarmView((OWN, *(server_record(name, "4:8") for name in lines)))
    loop: Any = asyncio.get_running_loop()
    with patch.object(time, "perf_counter", loop.time):
        while not asked or set().union(*asked) < set(lines):
            asked.append(set())
            await probe.measure(view, OWN)
    assert max(map(len, asked[1:])) == MAX_ANNOUNCED + 2
    assert min(probe.rtts_s, key=probe.rtts_s.__getitem__) == "other7"


def test_links_to_near_servers_have_the_shortest_of_several_round_trips() -> None:
    async def story(line: Line) -> dict[str, MeasuredLink]:
        loop: Any = asyncio.get_running_loop()
        with patch.object(time, "perf_counter", loop.time):
            return await NetworkProbe(line).links([OTHER], most_rtt_s=0.06)  # type: ignore[arg-type]

    (link,) = run_virtually(story(Line(MBIT, 0.05, delays_s=[0.3, 0.1]))).values()
    assert (link.rtt_s, link.bytes_per_s) == (pytest.approx(0.05), pytest.approx(MBIT, rel=1e-3))
    far, gone = Line(MBIT, 0.07), Line(MBIT)
    gone.is_gone = True
    assert run_virtually(story(far)) == run_virtually(story(gone)) == {}
    assert max(far.sizes) == 0  # no bandwidth is measured where it would not matter
