"""Servers measure the way to those that may come next, and notice the dead on whom blocks depend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from swarm_client.core import background
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.span import Span
from swarm_server.net.network_probe import MAX_ANNOUNCED, NetworkProbe, may_follow
from swarm_server.net.push import ChannelPool
from swarm_server.node import server
from tests.swarm.delay import DelayedPort
from tests.swarm.harness import InProcessServers
from tests.swarm.waiting import wait_for
from tests.unit.support import server_record
from tests.zoo import save_checkpoint

SPANS = ("0:3", "3:6")

pytestmark = pytest.mark.promise("servers measure the way to those that may come next, and notice the dead")


@pytest.fixture
def records(servers) -> tuple[ServerRecord, ServerRecord]:
    left, right = servers.records()
    return left, right


@pytest.fixture
def network_probe() -> Iterator[NetworkProbe]:
    channels = ChannelPool(partial(pinned_channel, ClientCredentials(Identity.generate())))
    yield NetworkProbe(channels)
    background.run(channels.close())


def dead(record: ServerRecord, name: str) -> ServerRecord:
    return replace(record, peer_id=name, addresses=("127.0.0.1:9",))


def test_the_way_to_the_next_hop_is_measured(records, network_probe) -> None:
    left, right = records
    background.run(network_probe.measure(SwarmView((left, right, dead(right, "dead"))), left))
    assert set(network_probe.rtts_s) == {right.peer_id}
    assert 0 < network_probe.rtts_s[right.peer_id] < 3
    assert network_probe.bytes_per_s > 1e5


def test_the_last_server_still_measures_how_many_bytes_pass(records, network_probe) -> None:
    left, right = records
    background.run(network_probe.measure(SwarmView((left, right)), right))
    assert network_probe.rtts_s == {} and network_probe.bytes_per_s > 1e5


def test_the_nearest_are_announced(records, network_probe) -> None:
    """The same server under many names, one of them far away."""
    left, right = records
    port = int(right.addresses[0].rpartition(":")[2])
    with DelayedPort(port, delay_s=0.1) as far:
        names = [replace(right, peer_id=f"copy{number}") for number in range(MAX_ANNOUNCED)]
        distant = replace(right, peer_id="distant", addresses=(f"127.0.0.1:{far.port}",))
        for _ in range(3):
            background.run(network_probe.measure(SwarmView((left, distant, *names)), left))
    assert set(network_probe.rtts_s) == {record.peer_id for record in names}


def test_servers_announce_what_they_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server, "_PROBE_S", (0.1, 0.3))
    save_checkpoint("llama", tmp_path)
    with InProcessServers(tmp_path, memory_dht=True) as servers:
        servers.start("0:3", "3:6")
        _left, right = servers.records()

        def measured() -> bool:
            first, second = sorted(servers.describe(), key=lambda record: record.span)
            return first.next_hop_rtts_s.get(right.peer_id, 0) > 0 and not second.next_hop_rtts_s

        wait_for(measured, "the first server has measured the way to the second")


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


def peer_ids(view: SwarmView) -> set[str]:
    return {record.peer_id for record in view.servers}


def test_the_dead_are_noticed_until_they_are_heard_of(records, network_probe) -> None:
    left, right = records
    ghost = replace(dead(left, "ghost"), expires_at=1000.0)
    view = SwarmView((left, right, ghost))
    assert peer_ids(background.run(network_probe.living(view, right))) == {left.peer_id, right.peer_id}
    # It answers now, but the record is the old one; then it publishes another.
    back = replace(left, peer_id="ghost", expires_at=1000.0)
    view = SwarmView((left, right, back))
    assert peer_ids(background.run(network_probe.living(view, right))) == {left.peer_id, right.peer_id}
    view = SwarmView((left, right, replace(back, expires_at=1020.0)))
    assert "ghost" in peer_ids(background.run(network_probe.living(view, right)))


def test_of_many_those_are_asked_first_without_whom_blocks_may_be_missing(records, network_probe) -> None:
    left, right = records
    crowd = [dead(left, f"dead{number}") for number in range(100)]
    living = background.run(network_probe.living(SwarmView((*crowd, dead(right, "dead right"), right)), right))
    assert "dead right" not in peer_ids(living)
    assert 60 < len(living.servers) < 80  # some of the crowd have been found out


def test_those_that_do_not_serve_yet_are_not_asked(records, network_probe) -> None:
    left, _right = records
    joining = replace(dead(left, "joining"), state=ServerState.JOINING, span=Span(3, 6))
    assert background.run(network_probe.living(SwarmView((left, joining)))).servers == (left, joining)
