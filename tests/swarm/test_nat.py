"""Server and client both behind routers that translate addresses: real processes in network namespaces."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_client.core import background
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.tunnel.circuit import relay_of
from tests.quick_keys import new_identity
from tests.swarm.nat import FirewalledNetwork, NatNetwork
from tests.swarm.pair import ends_only_at_its_length
from tests.swarm.processes import ForkedProcess, ServerProcess, lone_client, run_commands
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.zoo import VOCAB

pytestmark = pytest.mark.slow
PROMPT = torch.randint(3, VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 24


class Lab:
    """Servers on the hosts of a network, and a client in one of its homes."""

    def __init__(self, network: NatNetwork, directory: Path, cache: Path, stack: ExitStack) -> None:
        self.network, self._directory, self._cache, self._stack = network, directory, cache, stack
        self.peers: list[str] = []
        self._dht: Dht | None = None

    def serve(self, host: str, blocks: str, *flags: str) -> ServerProcess:
        """A public host listens at its address; one in a home has found nothing out about its router."""
        arguments = ["--model", str(self._directory), "--blocks", blocks, "--quant", "none", "--throughput", "100"]
        arguments += ["--initial-peers", *self.peers] if self.peers else ["--host", self.network.addresses[host]]
        cache = self._cache / host
        cache.mkdir(exist_ok=True)
        start = partial(ServerProcess, *arguments, *flags, cache=cache)
        process = self._stack.enter_context(self.network.run(host, start))
        if not host.startswith("home"):
            self.peers.append(process.ready["peer"])
        return process

    def serve_hidden(self, *flags: str) -> ServerProcess:
        """A server in the first home, of the blocks that a public one lacks; returns once it has a relay."""
        hidden = self.serve("home-a", "2:6", *flags)
        wait_for(lambda: self.relays_of(hidden), "the server has a relay")
        return hidden

    def records(self) -> list[ServerRecord]:
        """As a public host sees them: this process."""
        if self._dht is None:
            self._dht = background.run(Dht.join("default", self.peers, new_identity()))
            self._stack.callback(lambda: background.run(self._dht.shutdown()))
        return list(background.run(self._dht.view(self._directory.name, 6)).servers)

    def relays_of(self, process: ServerProcess) -> set[str]:
        peer_id = process.ready["peer"].rpartition("/")[2]
        found = (record for record in self.records() if record.peer_id == peer_id)
        return {relay_of(address) for record in found for address in record.addresses} - {""}

    def relays_in_status(self) -> set[str | None]:
        """The relays by which the client reaches servers, as its status says; None of those that it reaches itself."""
        command = ["status", "--initial-peers", *self.peers, "--json"]
        (done,) = self.network.run("home-b", partial(run_commands, "swarm_client", [command], self._cache))
        (model,) = json.loads(done.stdout)["models"]
        return {server["relay"] for server in model["servers"]}

    def generate(self, waits_after: int = 0) -> ForkedProcess:
        """Start a client in the second home. It waits after so many tokens until it is read further."""
        task = [str(self._directory), {"initial_peers": self.peers}, PROMPT[0].tolist(), NEW_TOKENS, waits_after]
        client = self.network.run("home-b", partial(lone_client, task, dict(os.environ)))
        self._stack.callback(client.kill)
        return client

    def begin(self) -> tuple[ForkedProcess, list[int]]:
        """Start a client; return it with its first tokens, after which it waits."""
        client = self.generate(waits_after=6)
        return client, [int(client.stdout.readline()) for _ in range(6)]


@pytest.fixture(scope="module")
def expected(llama) -> list[int]:
    model = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))
    return model.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)[0, PROMPT.shape[1] :].tolist()


@pytest.fixture
def lab(llama, tmp_path) -> Iterator[Lab]:
    with NatNetwork("one", "two", homes=("home-a", "home-b")) as network, ExitStack() as stack:
        yield Lab(network, llama, tmp_path, stack)


def tokens_of(client: ForkedProcess) -> list[int]:
    client.stdin.close()
    tokens = list(map(int, client.stdout.read().split()))
    assert client.wait(DEADLINE_S) == 0
    return tokens


def test_two_routers_let_their_homes_connect_directly(lab, expected):
    """After which the relay is not needed any more: it is killed while nothing but tokens is under way."""
    for home in ("home-a", "home-b"):
        lab.network.says_nothing(home)
    assert lab.network.bytes_between("home-b", "home-a") == 0
    lab.serve("one", "0:2", "--relay-for-others", "0")
    relay = lab.serve("two", "5:6")
    lab.serve_hidden()
    assert lab.relays_in_status() == {None}
    of_status = lab.network.bytes_between("home-b", "home-a")
    client, seen = lab.begin()
    relay.kill()
    before = lab.network.bytes_between("home-b", "home-a")
    assert seen + tokens_of(client) == expected
    assert lab.network.bytes_between("home-b", "home-a") > before > of_status > 0


def test_two_firewalls_let_their_homes_connect_directly_over_ipv6(llama, tmp_path, expected):
    """Addresses are nobody else's there, but routers at home let in answers alone."""
    with FirewalledNetwork("one", homes=("home-a", "home-b")) as network, ExitStack() as stack:
        lab = Lab(network, llama, tmp_path, stack)
        network.bytes_between("home-b", "home-a")
        lab.serve("one", "0:2")
        lab.serve_hidden()
        assert tokens_of(lab.generate()) == expected
        assert network.bytes_between("home-b", "home-a") > 0


def test_a_router_that_draws_ports_leaves_it_to_the_relay(lab, expected):
    for home in ("home-a", "home-b"):
        lab.network.says_nothing(home)
    lab.network.draws_ports("home-b")
    assert lab.network.bytes_between("home-b", "home-a") == 0
    one = lab.serve("one", "0:2")
    lab.serve_hidden()
    relays = {None, one.ready["peer"].rpartition("/")[2]}
    wait_for(lambda: lab.relays_in_status() == relays, "the client reaches one server through the other")
    assert tokens_of(lab.generate()) == expected
    assert lab.network.bytes_between("home-b", "home-a") == 0


@pytest.mark.parametrize("way", ["through the relay", "directly"])
def test_routers_that_forget_silent_connections(lab, expected, way):
    """Both forget after 9 s; the client is silent for longer in the middle of a generation, and before it."""
    for home in ("home-a", "home-b"):
        lab.network.forget_after(home, 9)
        if way == "directly":
            lab.network.says_nothing(home)
    lab.serve("one", "0:2")
    hidden = lab.serve_hidden("--relay-keepalive", "3")
    client, seen = lab.begin()
    time.sleep(12.0)
    assert seen + tokens_of(client) == expected
    assert "does not answer any more" not in hidden.stderr


def test_a_laptop_that_changes_networks_goes_on_serving(lab, expected):
    lab.serve("one", "0:2")
    hidden = lab.serve_hidden("--relay-keepalive", "2")
    client, seen = lab.begin()
    address = lab.network.change_address("home-a", 77)
    assert seen + tokens_of(client) == expected
    peer_id = hidden.ready["peer"].rpartition("/")[2]
    wait_for(
        lambda: any(r.peer_id == peer_id and r.addresses[0].startswith(f"{address}:") for r in lab.records()),
        "the server announces its new address",
    )
