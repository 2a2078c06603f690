"""Servers that nobody reaches directly, on loopback: the address that they announce leads nowhere."""

from __future__ import annotations

import socket

import pytest
import torch

from swarm_cli.demo.local_cluster import LocalServer
from swarm_client import ClientConfig
from swarm_client.core import background
from swarm_gateway.monitor.status import read_status
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.tunnel.circuit import relay_of
from tests.swarm import test_recovery_basics as basics
from tests.swarm.harness import InProcessServers, Watcher
from tests.swarm.waiting import wait_for

NOWHERE = "127.0.0.1:1"  # connections are refused
servers, connect, expected, generate = basics.servers, basics.connect, basics.expected, basics.generate


def hidden(servers: InProcessServers, *spans: str, num_relays: int = 1, **options) -> list[ServerRecord]:
    """Starts servers that are reached through relays alone, so many each."""
    servers.start(*spans, relay="always", announce_address=NOWHERE, relay_keepalive_s=1.0, **options)

    def records() -> list[ServerRecord]:
        found = [record for record in servers.records() if record.addresses[0] == NOWHERE]
        return found if len(found) == len(spans) and all(len(r.addresses) > num_relays for r in found) else []

    return wait_for(records, "servers have relays")


@pytest.mark.promise("servers behind home routers are reached through members that relay")
def test_a_chain_of_servers_that_push_through_a_relay(servers, connect, expected):
    servers.start("0:2")
    records = hidden(servers, "2:4", "4:6")
    (relay,) = (record for record in servers.records() if record.addresses[0] != NOWHERE)
    assert {relay_of(address) for record in records for address in record.addresses[1:]} == {relay.peer_id}
    model = connect()
    assert torch.equal(generate(model), expected)
    config = ClientConfig(initial_peers=tuple(servers.initial_peers), swarm=servers.swarm)
    (status,) = background.run(read_status(config)).models
    assert {server.record.peer_id: server.relay_id for server in status.servers} == {
        relay.peer_id: "",
        **{record.peer_id: relay.peer_id for record in records},
    }


def test_no_token_is_lost_when_the_relay_dies_and_another_is_found(servers, connect, expected, cluster):
    arguments = ["--model", str(servers.model), "--blocks", "0:2", "--quant", "none", "--throughput", "100"]
    arguments += ["--swarm", servers.swarm, "--host", "127.0.0.1"]
    relays: dict[str, LocalServer] = {}
    peers: list[str] = []
    try:
        for _ in range(3):
            relay = cluster.start(*arguments, *(["--initial-peers", *peers] if peers else []))
            cluster.wait_ready([relay])
            peers.append(relay.ready["peer"])
            relays[relay.peer_id] = relay
        (record,) = hidden(servers, "2:6", num_relays=2, initial_peers=tuple(peers))
        assert len(record.addresses) == 3  # two of the three relays
        model = connect(initial_peers=peers)
        used = relay_of(record.addresses[1])
        assert torch.equal(generate(model, streamer=Watcher(6, relays[used].kill)), expected)

        def relays_now() -> set[str]:
            (now,) = (found for found in servers.records() if found.peer_id == record.peer_id)
            return {relay_of(address) for address in now.addresses[1:]}

        wait_for(lambda: relays_now() == relays.keys() - {used}, "the server has found another relay")
        assert torch.equal(generate(model), expected)
    finally:
        for relay in relays.values():
            relay.kill()


def test_servers_that_speak_ipv6(servers, connect, expected):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"there is no IPv6 here: {error}")
    servers.start("0:3", host="::1")
    servers.start("3:6", host="::1")
    assert all(record.addresses[0].startswith("[::1]:") for record in servers.records())
    assert all(peer.startswith("/ip6/::1/tcp/") for peer in servers.initial_peers)
    assert torch.equal(generate(connect()), expected)
