"""``--discover`` on hosts of one network: who is given no address finds the swarm, or says that there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from swarm_cli.demo.local_cluster import LocalCluster
from tests.marks import SLOW
from tests.swarm.network import Network
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.zoo import save_checkpoint

COMMAND_S = 120.0


class Hosts:
    """Each has servers and commands of its own, and a home of its own."""

    def __init__(self, network: Network, homes: Path, cleanup: ExitStack) -> None:
        self.network, self._homes = network, homes
        self.clusters = {
            host: cleanup.enter_context(network.run(host, partial(LocalCluster, self._environment(host))))
            for host in ("one", "two")
        }

    def command(self, host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "swarm_client", *arguments]
        environment = {**os.environ, **self._environment(host)}
        return self.network.run(
            host,
            partial(subprocess.run, command, env=environment, capture_output=True, text=True, timeout=COMMAND_S),
        )

    def _environment(self, host: str) -> dict[str, str]:
        return {"XDG_CACHE_HOME": str(self._homes / host)}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    with ExitStack() as cleanup:
        network = cleanup.enter_context(Network("one", "two", "three"))
        yield Hosts(network, tmp_path_factory.mktemp("homes"), cleanup)


@SLOW
def test_servers_that_start_together_are_one_swarm_and_a_client_finds_it(hosts, tmp_path):
    save_checkpoint("llama", tmp_path / "llama")
    flags = ["--model", str(tmp_path / "llama"), "--quant", "none", "--throughput", "10", "--discover"]
    servers = {
        host: hosts.clusters[host].start(*flags, "--swarm", "lan", "--blocks", blocks)
        for host, blocks in (("one", "0:3"), ("two", "3:6"))
    }
    for host, server in servers.items():
        hosts.clusters[host].wait_ready([server])
        assert server.ready["grpc"].startswith(f"{hosts.network.addresses[host]}:")

    def seen() -> set[str]:
        done = hosts.command("three", "status", "--discover", "--swarm", "lan", "--json")
        assert done.returncode == 0, done.stderr
        return {server["peer_id"] for model in json.loads(done.stdout)["models"] for server in model["servers"]}

    wait_for(lambda: seen() == {server.peer_id for server in servers.values()}, "a client sees both servers")
    for host, server in servers.items():
        server.signal(15)
        assert server.wait_gone(DEADLINE_S), host
