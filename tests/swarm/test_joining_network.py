"""Servers of several hosts listen where others reach them, and are found, without being told where that is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.status import read_status
from tests.swarm.network import Network
from tests.swarm.processes import ForkedCluster, run_commands
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.zoo import save_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network("one", "two", "three") as network:
        yield network


@pytest.fixture
def clusters(network, tmp_path) -> Iterator[dict[str, LocalCluster]]:
    """On each host, with a home of its own."""
    with ExitStack() as stack:
        yield {
            host: stack.enter_context(
                network.run(host, partial(ForkedCluster, {"XDG_CACHE_HOME": str(tmp_path / host)}))
            )
            for host in ("one", "two", "three")
        }
        network.mend("three")


def words(server: LocalServer) -> str:
    return server.stderr.read_text() if server.stderr.exists() else ""


def test_a_server_listens_where_the_swarm_reaches_it(network, clusters):
    one = clusters["one"].start("--num-blocks", "10", "--host", network.addresses["one"])
    clusters["one"].wait_ready([one])
    two = clusters["two"].start("--num-blocks", "10", "--initial-peers", one.ready["peer"])
    beside_one = clusters["one"].start("--num-blocks", "5")  # finds its swarm through the registry
    for host, server in (("two", two), ("one", beside_one)):
        clusters[host].wait_ready([server])
        assert server.ready["grpc"].startswith(f"{network.addresses[host]}:")
        assert server.ready["peer"].startswith(f"/ip4/{network.addresses[host]}/tcp/")

    def all_answer() -> bool:
        (model,) = background.run(read_status(ClientConfig(initial_peers=(two.ready["peer"],)))).models
        return len(model.servers) == 3 and all(server.answers for server in model.servers)

    wait_for(all_answer, "a client of a third host speaks to all servers")


def test_the_loopback_is_refused_and_silence_is_said(network, clusters):
    one = clusters["one"].start("--num-blocks", "10", "--host", network.addresses["one"])
    clusters["one"].wait_ready([one])
    peer = one.ready["peer"]
    local = clusters["two"].start("--host", "127.0.0.1", "--initial-peers", peer)
    elsewhere = clusters["two"].start("--initial-peers", peer.replace(network.addresses["one"], "192.0.2.7"))
    network.cut("three")
    silent = clusters["three"].start("--initial-peers", peer)
    for server, sentence in (
        (local, "host 127.0.0.1 is for this machine alone, and /ip4/"),
        (elsewhere, "there is no route from this machine to /ip4/192.0.2.7/"),
        (silent, "no initial peer answered: /ip4/"),
    ):
        assert server.wait_gone(DEADLINE_S)
        assert words(server).splitlines()[-1].startswith(f"error: {sentence}"), words(server)
        assert "Traceback" not in words(server)


def test_servers_that_are_given_no_address_find_each_other_and_a_client_finds_them(network, clusters, tmp_path):
    save_checkpoint("llama", tmp_path / "llama")
    common = ["--discover", "--swarm", "lan"]
    flags = ["--model", str(tmp_path / "llama"), "--quant", "none", "--throughput", "10", *common]
    servers = {
        host: clusters[host].start(*flags, "--blocks", blocks) for host, blocks in (("one", "0:3"), ("two", "3:6"))
    }
    for host, server in servers.items():
        clusters[host].wait_ready([server])
        assert server.ready["grpc"].startswith(f"{network.addresses[host]}:")

    def seen() -> set[str]:
        (done,) = network.run(
            "three", lambda: run_commands("swarm_client", [["status", "--json", *common]], tmp_path / "three")
        )
        assert done.code == 0, done.stderr
        return {server["peer_id"] for model in json.loads(done.stdout)["models"] for server in model["servers"]}

    wait_for(lambda: seen() == {server.peer_id for server in servers.values()}, "a client sees both servers")
