"""Servers measure the way to those that may come next, and notice the dead, over real connections."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from swarm_client import ClientConfig
from swarm_client.core import background
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.dht.records import ServerRecord, SwarmView
from swarm_protocol.errors import BadReply
from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.tunnel.dialing import Dialer
from swarm_server.net.network_probe import NetworkProbe
from swarm_server.net.push import ChannelPool
from swarm_server.node import server
from tests.quick_keys import new_identity
from tests.swarm.harness import InProcessServers
from tests.swarm.raw_client import own_credentials
from tests.swarm.waiting import wait_for
from tests.zoo import save_checkpoint

SPANS = ("0:3", "3:6")

pytestmark = pytest.mark.promise("servers measure the way to those that may come next, and notice the dead")


def test_servers_announce_what_they_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server, "_PROBE_S", (0.1, 0.3))
    save_checkpoint("llama", tmp_path)
    with InProcessServers(tmp_path, memory_dht=True) as servers:
        servers.start("0:3", "3:6")
        _left, right = servers.records()

        def measured() -> bool:
            first, second = sorted(servers.describe(), key=lambda record: record.span)
            return 0 < first.next_hop_rtts_s.get(right.peer_id, 0) < 3 and not second.next_hop_rtts_s

        wait_for(measured, "the first server has measured the way to the second")


def test_the_dead_are_noticed_until_they_are_heard_of(servers) -> None:
    left, right = servers.records()
    channels = ChannelPool(partial(pinned_channel, ClientCredentials(new_identity())))
    probe = NetworkProbe(channels)

    def living(*others) -> set[str]:
        view = background.run(probe.living(SwarmView((left, right, *others)), right))
        return {record.peer_id for record in view.servers}

    ghost = replace(left, peer_id="ghost", addresses=("127.0.0.1:9",), expires_at=1000.0)
    assert living(ghost) == {left.peer_id, right.peer_id}
    # It answers now, but the record is the old one; then it publishes another.
    back = replace(left, peer_id="ghost", expires_at=1000.0)
    assert living(back) == {left.peer_id, right.peer_id}
    assert "ghost" in living(replace(back, expires_at=1020.0))
    background.run(channels.close())


def test_a_server_describes_itself_and_nobody_else(servers) -> None:
    async def described(record: ServerRecord) -> ServerRecord:
        server = await ServerConnection.connect(record, ClientConfig(), Dialer(own_credentials()))
        try:
            return await server.describe()
        finally:
            await server.close()

    record, _ = servers.records()
    assert background.run(described(record)).addresses == record.addresses
    with pytest.raises(BadReply, match=f"nobody described itself wrongly: it says that it is {record.short_id}"):
        background.run(described(replace(record, peer_id="nobody")))
