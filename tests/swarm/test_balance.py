"""Real servers: traffic takes the fastest chain, and a session goes on when its server moves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client.core import background
from swarm_protocol.dht.records import SwarmView
from tests.marks import SLOW
from tests.swarm.delay import DelayedPort
from tests.swarm.pair import NEW_TOKENS, ends_only_at_its_length, random_ids
from tests.swarm.survival import ROOM, Client
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.unit.support import quiet_port
from tests.zoo import save_checkpoint

PROMPT = random_ids(1, 20, seed=40)
LEFT, RIGHT = "0:3", "3:6"
_numbers = count()


class Volunteers:
    """Servers of one swarm with the speeds they are told to announce.

    Attributes:
        whole: the model in this process.
    """

    def __init__(self, cluster: LocalCluster, model, whole: PreTrainedModel) -> None:
        self.model, self.whole = model, whole
        self.swarm = f"balance-{os.getpid()}-{next(_numbers)}"
        self._cluster = cluster
        self.servers: list[LocalServer] = []

    def start(self, throughput: float, *options: str) -> LocalServer:
        """Returns when it is ready."""
        known = ["--model", str(self.model), "--swarm", self.swarm, "--quant", "none", "--cache-tokens", str(ROOM)]
        server = self._cluster.start(*known, "--throughput", str(throughput), *options)
        self.servers.append(server)
        self._cluster.wait_ready([server])
        return server

    @property
    def running(self) -> list[LocalServer]:
        return [server for server in self.servers if server.alive]

    def close(self) -> None:
        for server in self.running:
            server.kill()
            assert server.wait_gone(DEADLINE_S)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("balance") / "llama"
    save_checkpoint("llama", directory)
    return directory, ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(directory, dtype="float32"))


@pytest.fixture
def volunteers(cluster, checkpoint) -> Iterator[Volunteers]:
    volunteers = Volunteers(cluster, *checkpoint)
    yield volunteers
    volunteers.close()


@pytest.fixture
def fleet(volunteers) -> Volunteers:
    """Clients connect to these."""
    return volunteers


def view(client: Client) -> SwarmView:
    return background.run(client.model.blocks.swarm.view(0))


def peers(client: Client) -> list[str]:
    """The servers of the session that is open."""
    return [hop.hop.server.peer_id for hop in client.chain.hops]


@SLOW
def test_traffic_takes_the_fast_chain_and_then_the_next_best(volunteers, connect, moments):
    """Near and fast servers for both halves, a slow one, one far away, and one that is neither."""
    fast, left = volunteers.start(1000, "--blocks", RIGHT), volunteers.start(1000, "--blocks", LEFT)
    second, _slow = volunteers.start(15, "--blocks", RIGHT), volunteers.start(2, "--blocks", LEFT)
    port = quiet_port()
    with DelayedPort(port, delay_s=0.2) as far_away:
        announced = ["--port", str(port), "--announce-address", f"127.0.0.1:{far_away.port}"]
        far = volunteers.start(1000, "--blocks", RIGHT, *announced)
        client, seen = connect(), []
        moments.before_step(3, lambda: seen.append(peers(client)))
        moments.before_step(5, fast.kill)
        moments.before_step(8, lambda: seen.append(peers(client)))
        moments.before_step(9, second.kill)
        moments.before_step(12, lambda: seen.append(peers(client)))
        client.generate(PROMPT)
        assert seen == [[left.peer_id, server.peer_id] for server in (fast, second, far)]
        # Who comes later hears no more of the dead, though their records are still there.
        newcomer = connect_to_the_living(connect, volunteers)
        moments.before_step(NEW_TOKENS + 3, lambda: seen.append(peers(newcomer)))
        newcomer.generate(PROMPT)
        assert newcomer.events == [] and seen[-1] == [left.peer_id, far.peer_id]


def connect_to_the_living(connect: Callable[..., Client], volunteers: Volunteers) -> Client:
    peers = [server.ready["peer"] for server in volunteers.running]
    return connect(initial_peers=peers)


@SLOW
def test_a_session_goes_on_when_its_server_moves(volunteers, connect, moments):
    """A second server comes to the left half: the first is needed more in the right one, and hands its session over."""
    first = volunteers.start(100, "--initial-blocks", LEFT)
    volunteers.start(100, "--blocks", RIGHT)
    client = connect()
    moments.before_step(3, lambda: volunteers.start(100, "--blocks", LEFT))
    moments.before_step(4, lambda: wait_for(lambda: client.moves, "the session has moved"))
    client.generate(PROMPT)
    assert client.recoveries == []
    (moved,) = client.moves
    assert (moved.server, str(moved.span)) == (first.peer_id, LEFT)
    assert moved.copied_tokens >= PROMPT.shape[1]

    def has_other_blocks() -> bool:
        spans = {server.peer_id: str(server.span) for server in view(client).online()}
        return spans.get(first.peer_id, LEFT) != LEFT

    wait_for(has_other_blocks, "the server is back with other blocks")
