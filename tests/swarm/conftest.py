"""Fixtures that start real servers; they wait for readiness, never for a fixed time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_cli.demo.local_cluster import LocalCluster
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm import peer_health
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import decode
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import Pair, random_ids, started
from tests.swarm.processes import ForkedCluster, ServerProcess
from tests.swarm.raw_client import RawClient
from tests.swarm.survival import Client, Fleet, Moments
from tests.swarm.target import CLOSE, HOSTED, ROOM, TOKENS, Target, assert_session_works
from tests.swarm.waiting import wait_for
from tests.zoo import PAD, VOCAB, save_checkpoint


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    """The cache directory of all tests, so that they never meet the user's own swarm."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.fixture(scope="session", autouse=True)
def all_servers_are_known() -> Iterator[None]:
    """Tests know which server is taken: also where a busy machine is slow to answer the first ping."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_health, "_ENOUGH_S", 5.0)
        yield


@pytest.fixture
def server_process(tmp_path):
    """Starts ``python -m swarm_server ARGUMENTS``; whatever still runs after the test is ended."""
    started: list[ServerProcess] = []

    def start(*arguments: str, cache=tmp_path, **options: bool) -> ServerProcess:
        started.append(ServerProcess(*arguments, cache=cache, **options))
        return started[-1]

    yield start
    for process in started:
        process.__exit__()


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A checkpoint of a small llama, which is called so."""
    directory = tmp_path_factory.mktemp("models") / "llama"
    save_checkpoint("llama", directory)
    return directory


@pytest.fixture(scope="module")
def servers(request, llama) -> Iterator[InProcessServers]:
    """Servers of the blocks that the test module names in ``SPANS``."""
    with InProcessServers(llama, memory_dht=True) as servers:
        servers.start(*request.module.SPANS)
        yield servers


@pytest.fixture
def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts longer than a sliding window, the first padded on its left, and their mask."""
    ids = random_ids(2, 14, seed=0)
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = PAD, 0
    return ids, mask


@pytest.fixture(scope="module")
def shipped() -> Iterator[InProcessServers]:
    """Servers of the shipped model, which other processes find."""
    with InProcessServers(Path(locate(DEFAULT_MODEL))) as servers:
        servers.start("0:10", "10:20")
        yield servers


@pytest.fixture(scope="module")
def shipped_whole() -> PreTrainedModel:
    """The shipped model in this process."""
    return AutoModelForCausalLM.from_pretrained(locate(DEFAULT_MODEL), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    """A model here and through servers of the test module's ``SPANS``; in the end, their room must be free."""
    with started(tmp_path_factory.mktemp("llama"), *request.module.SPANS) as pair:
        yield pair
        pair.servers.wait_until_all_room_is_free()


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """How many new positions each step through the servers brings."""
    counts: list[int] = []
    step = RemoteSession.step

    def counted(session: RemoteSession, inputs, *args) -> torch.Tensor:
        counts.append(inputs.hidden.shape[1])
        return step(session, inputs, *args)

    monkeypatch.setattr(RemoteSession, "step", counted)
    return counts


@pytest.fixture(scope="session")
def cluster(cache_home) -> Iterator[LocalCluster]:
    with ForkedCluster({"XDG_CACHE_HOME": str(cache_home)}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def all_fleet(cluster, tmp_path_factory) -> Fleet:
    return Fleet(cluster, tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def fleet(all_fleet) -> Iterator[Fleet]:
    """After each test, those servers that are left must have their room back."""
    all_fleet.restore()
    yield all_fleet
    for server in all_fleet.running:
        server.signal(signal.SIGCONT)
    all_fleet.wait_until_all_room_is_free()


@pytest.fixture
def connect(fleet) -> Iterator[Callable[..., Client]]:
    """Clients of the fleet."""
    clients: list[Client] = []

    def connect(**options) -> Client:
        clients.append(Client(fleet, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(connect) -> Client:
    return connect()


@pytest.fixture
def moments(monkeypatch) -> Moments:
    return Moments(monkeypatch)


@pytest.fixture(scope="module")
def idle_target(llama) -> Iterator[Target]:
    whole = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    boundaries: list[torch.Tensor] = []
    whole.model.layers[HOSTED[0]].register_forward_pre_hook(lambda _block, inputs: boundaries.append(inputs[0]))
    whole.model.layers[HOSTED[1] - 1].register_forward_hook(lambda _block, _inputs, output: boundaries.append(output))
    with torch.no_grad():
        whole(torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0)))
    with InProcessServers(llama, cache_tokens=ROOM, memory_dht=True) as servers:
        servers.start(f"{HOSTED[0]}:{HOSTED[1]}")
        with RawClient(servers.records()[0]) as client:
            yield Target(client, *boundaries)


@pytest.fixture
def target(idle_target) -> Iterator[Target]:
    """After each test the server must have its room back and still compute what the whole model computes."""
    yield idle_target
    client = idle_target.client
    wait_for(lambda: client.describe().cache_tokens_left == ROOM, "the room of refused sessions has come back")
    (reply,) = client.forward(pb.ForwardRequest(forward=idle_target.forward())).replies
    assert torch.equal(decode(reply.output), idle_target.expected)
    assert_session_works(idle_target.talk(idle_target.open(), idle_target.step(), CLOSE), idle_target, 1)
    wait_for(lambda: client.describe().cache_tokens_left == ROOM, "the room of a good session has come back")
