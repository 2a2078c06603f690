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
from swarm_protocol.net.identity import Identity
from swarm_server.group import links
from swarm_server.group.group_key import read_group_key
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


@SLOW
@pytest.mark.skipif(links.library() is None, reason="no compiled kernel")
def test_members_of_a_group_that_start_together_find_each_other(hosts, tmp_path):
    """Neither has an address of the other, and each begins with a swarm of its own."""
    save_checkpoint("llama", tmp_path / "llama", hidden_size=128, intermediate_size=320)
    read_group_key(tmp_path / "group.key", create=True)
    flags = ["--model", str(tmp_path / "llama"), "--blocks", "0:6", "--throughput", "10", "--discover"]
    flags += ["--swarm", "near", "--group", "lab", "--group-key", str(tmp_path / "group.key"), "--group-always"]
    servers = {host: hosts.clusters[host].start(*flags) for host in hosts.clusters}
    leader = wait_for(
        lambda: next((host for host, each in servers.items() if each.ready.get("group") == "2"), None), "one leads"
    )
    (follower,) = [each for host, each in servers.items() if host != leader]
    assert f"following leader={hosts.network.addresses[leader]}:" in follower.stdout.read_text()
    for server in servers.values():
        server.kill()


# Says that a member is where nobody listens.
FALSE_ANSWER = """
import asyncio, sys
from swarm_protocol.dht.lan_discovery import LanDiscovery
async def main():
    discovery = await LanDiscovery.start("lied")
    assert await discovery.advertise(sys.argv[2], [f"/ip4/{sys.argv[1]}/tcp/9/p2p/{sys.argv[2]}"])
    print("advertised", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await discovery.close()
asyncio.run(main())
"""


@SLOW
def test_a_false_answer_keeps_no_server_from_its_swarm(hosts):
    command = [sys.executable, "-c", FALSE_ANSWER, hosts.network.addresses["three"], Identity.generate().peer_id]
    start = partial(subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with hosts.network.run("three", start) as liar:
        assert liar.stdout.readline() == "advertised\n"
        server = hosts.clusters["one"].start("--discover", "--swarm", "lied", "--num-blocks", "1", "--throughput", "1")
        hosts.clusters["one"].wait_ready([server])
        assert "found on the local network, but no initial peer answered" in server.stderr.read_text()
        server.kill()
        liar.communicate("\n", timeout=COMMAND_S)
