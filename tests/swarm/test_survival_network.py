"""Links between hosts swallow packets while a client generates: silence is noticed, and its tokens stay the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.swarm.network import ME, Network
from tests.swarm.pair import random_ids
from tests.swarm.processes import ForkedCluster
from tests.swarm.survival import SPANS, Client, Fleet

PROMPT = random_ids(1, 8, seed=60)
OUTAGE_S = 10.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network("far") as network:
        yield network


@pytest.fixture(scope="module")
def far_fleet(network, cache_home, tmp_path_factory) -> Iterator[Fleet]:
    with network.run("far", lambda: ForkedCluster({"XDG_CACHE_HOME": str(cache_home)})) as cluster:
        fleet = Fleet(cluster, tmp_path_factory.mktemp("fleet"), name="far")
        fleet.wait_ready(*(fleet.add(blocks, "--host", network.addresses["far"]) for blocks in SPANS))
        yield fleet


@pytest.fixture
def client(network, far_fleet) -> Iterator[Client]:
    client = Client(far_fleet)
    yield client
    network.mend(ME)
    client.close()
    far_fleet.wait_until_all_room_is_free()


def test_the_clients_own_network_is_gone_for_a_while(network, client, moments):
    """No server can be reached, and none has failed."""

    def cut() -> None:
        network.cut(ME)
        threading.Timer(OUTAGE_S, network.mend, [ME]).start()

    moments.before_step(5, cut)
    client.generate(PROMPT)
    assert sum(recovery.stall_s for recovery in client.recoveries) > OUTAGE_S
