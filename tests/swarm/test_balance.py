"""Real servers: traffic takes the fastest chain, gaps close by themselves, and then there is rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client.core import background
from swarm_protocol.dht.records import SwarmView
from swarm_server.placement.placement import plan_moves
from tests.marks import SLOW
from tests.swarm.delay import DelayedPort
from tests.swarm.pair import NEW_TOKENS, ends_only_at_its_length, random_ids
from tests.swarm.survival import ROOM, Client, Moments
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.unit.support import quiet_port
from tests.zoo import BLOCKS, save_checkpoint

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

    @property
    def num_moves(self) -> int:
        return sum(server.stderr.read_text().count("moving from blocks") for server in self.servers)

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
def connect(volunteers) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connect(**options) -> Client:
        clients.append(Client(volunteers, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


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


@pytest.mark.parametrize("quiet_s", [10, pytest.param(60, marks=pytest.mark.long)])
def test_a_gap_closes_and_a_quiet_swarm_rests(volunteers, connect, moments: Moments, quiet_s):
    """The two servers of the right half die in mid-sentence; others come over from the left, and stay there."""
    # In an order in which nobody wants to move before all are there.
    for throughput, blocks in ((100, LEFT), (100, RIGHT), (50, LEFT), (50, RIGHT), (2, LEFT)):
        volunteers.start(throughput, "--initial-blocks", blocks)
    client = connect(recovery_timeout_s=120)

    def kill() -> None:
        for server in (volunteers.servers[1], volunteers.servers[3]):
            server.kill()

    moments.before_step(6, kill)
    client.generate(PROMPT)
    assert client.waits and client.moved_blocks in ([RIGHT], ["0:6"])  # the one that moves may have held the session
    assert volunteers.num_moves >= 1
    wait_for(lambda: is_settled(living(volunteers, client), len(volunteers.running)), "nobody wants to move any more")
    num_moves = volunteers.num_moves
    rest(volunteers, client, quiet_s)
    assert volunteers.num_moves == num_moves


def is_settled(view: SwarmView, num_servers: int) -> bool:
    online = [server for server in view.online() if server.next_span is None]
    return len(online) == num_servers and not plan_moves(view, BLOCKS)


def rest(volunteers: Volunteers, client: Client, quiet_s: float) -> None:
    """A while in which every server asks itself whether it should move; twice or more in sixty seconds."""
    end = time.monotonic() + quiet_s
    spans = {server.peer_id: server.span for server in living(volunteers, client).servers}
    while time.monotonic() < end:
        time.sleep(1)
        assert {server.peer_id: server.span for server in living(volunteers, client).servers} == spans


def living(volunteers: Volunteers, client: Client) -> SwarmView:
    """Without the records of the dead."""
    peer_ids = {server.peer_id for server in volunteers.running}
    return SwarmView(tuple(server for server in view(client).servers if server.peer_id in peer_ids))


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
