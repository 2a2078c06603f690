"""What a server finds of the ways to others, in virtual time: bytes per second, who is near, who is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.net.network_probe import MAX_ANNOUNCED, MeasuredLink, NetworkProbe, may_follow
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


class Lines:
    """To others by their names; nobody else answers. ``asked``: the names, in each round."""

    def __init__(self, **lines: Line) -> None:
        self.lines, self.asked = lines, [set[str]()]

    async def stub(self, server: ServerRecord) -> Line:
        self.asked[-1].add(server.peer_id)
        if server.peer_id not in self.lines:
            raise PeerUnavailable("gone")
        return self.lines[server.peer_id]


def measured(line: Line | Lines, rounds: int = 1, view: SwarmView = VIEW, own: ServerRecord = OWN) -> NetworkProbe:
    async def story() -> NetworkProbe:
        probe = NetworkProbe(line)  # type: ignore[arg-type]
        loop: Any = asyncio.get_running_loop()
        with patch.object(time, "perf_counter", loop.time):
            for _ in range(rounds):
                await probe.measure(view, own)
        return probe

    return run_virtually(story())


def living(view: SwarmView, own: ServerRecord | None, lines: Lines) -> list[str]:
    """Whom a server believes to be there."""
    probe = NetworkProbe(lines)  # type: ignore[arg-type]
    return [record.peer_id for record in run_virtually(probe.living(view, own)).servers]


@pytest.mark.parametrize("rtt_s", [0.001, 0.3])
@pytest.mark.parametrize("mbit", [0.05, 0.3, 0.6, 1, 10, 100, 1000])
def test_a_line_is_measured_whatever_it_is_like(mbit: float, rtt_s: float) -> None:
    assert measured(Line(mbit * MBIT, rtt_s)).bytes_per_s == pytest.approx(mbit * MBIT, rel=1e-3)


def test_a_slow_line_is_not_filled() -> None:
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


def test_the_last_server_still_measures_how_many_bytes_pass() -> None:
    probe = measured(Line(10 * MBIT), own=OTHER)
    assert probe.rtts_s == {} and probe.bytes_per_s == pytest.approx(10 * MBIT, rel=1e-3)


def test_the_nearest_are_announced() -> None:
    near = {f"near{number}": Line(MBIT) for number in range(MAX_ANNOUNCED)}
    lines = Lines(far=Line(MBIT, rtt_s=0.1), **near)
    view = SwarmView((OWN, *(server_record(name, "4:8") for name in lines.lines)))
    assert set(measured(lines, rounds=3, view=view).rtts_s) == near.keys()


@pytest.mark.run_by(function=run_virtually)
async def test_in_a_large_swarm_few_others_are_compared_with_the_nearest() -> None:
    lines = Lines(**{f"other{number}": Line(100 * MBIT, rtt_s=0.1) for number in range(40)})
    lines.lines["other7"].rtt_s = 0.01
    probe = NetworkProbe(lines)  # type: ignore[arg-type]
    view = SwarmView((OWN, *(server_record(name, "4:8") for name in lines.lines)))
    loop: Any = asyncio.get_running_loop()
    with patch.object(time, "perf_counter", loop.time):
        while set().union(*lines.asked) < lines.lines.keys():
            lines.asked.append(set())
            await probe.measure(view, OWN)
    assert max(map(len, lines.asked[2:])) == MAX_ANNOUNCED + 2
    assert min(probe.rtts_s, key=probe.rtts_s.__getitem__) == "other7"


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ("0:3", "3:6", True),
        ("0:3", "2:6", True),
        ("0:3", "4:6", False),  # a block is between
        ("0:3", "0:3", False),
        ("3:6", "0:3", False),
        ("0:3", "0:6", True),
    ],
)
def test_who_may_come_next(own: str, other: str, expected: bool) -> None:
    assert may_follow(server_record("own", own), server_record("other", other)) is expected


def test_of_many_those_are_asked_first_without_whom_blocks_may_be_missing() -> None:
    crowd = [server_record(f"dead{number}", "0:4") for number in range(100)]
    found = living(SwarmView((*crowd, server_record("last", "4:8"), OTHER)), OTHER, Lines())
    assert "last" not in found and "other" in found
    assert 60 < len(found) < 80  # some of the crowd have been found out


def test_those_that_do_not_serve_yet_are_not_asked() -> None:
    joining = server_record("joining", "4:8", state=ServerState.JOINING)
    assert living(SwarmView((OWN, joining)), None, Lines(own=Line(MBIT))) == ["own", "joining"]


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
