"""Links between hosts swallow packets while a client generates: silence is noticed, and its tokens stay the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from swarm_cli.demo.local_cluster import LocalCluster
from tests.swarm.network import ME, Network
from tests.swarm.pair import random_ids
from tests.swarm.survival import Client, Fleet

PROMPT = random_ids(1, 8, seed=60)
PLACES = {  # the slow ones are all on one host; so slow that no measured distance makes up for it
    "ends": [("0:2", "1000"), ("4:6", "1000")],
    "middle": [("2:4", "1000")],
    "reserve": [("0:2", "10"), ("2:4", "10"), ("4:6", "10")],
}
OUTAGE_S = 10.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(*PLACES) as network:
        yield network


@pytest.fixture(scope="module")
def far_fleet(network, cache_home, tmp_path_factory) -> Iterator[Fleet]:
    clusters = {
        place: network.run(place, lambda: LocalCluster({"XDG_CACHE_HOME": str(cache_home)})) for place in PLACES
    }
    try:
        fleet = Fleet(clusters["ends"], tmp_path_factory.mktemp("fleet"), name="far")
        for place, servers in PLACES.items():
            for blocks, throughput in servers:
                options = ["--throughput", throughput, "--host", network.addresses[place]]
                fleet.add(blocks, *options, cluster=clusters[place])
        fleet.wait_ready(*fleet.running)
        yield fleet
    finally:
        for cluster in clusters.values():
            cluster.close()


@pytest.fixture
def client(network, far_fleet) -> Iterator[Client]:
    client = Client(far_fleet)
    yield client
    for host in network.addresses:
        network.mend(host)
    client.close()
    far_fleet.wait_until_all_room_is_free()


def test_a_silent_server_is_replaced(network, client, moments):
    moments.before_step(5, lambda: network.cut("middle"))
    client.generate(PROMPT)
    assert client.moved_blocks == ["2:4"]


def test_the_clients_own_network_is_gone_for_a_while(network, client, moments):
    """No server can be reached, and none has failed."""

    def cut() -> None:
        network.cut(ME)
        threading.Timer(OUTAGE_S, network.mend, [ME]).start()

    moments.before_step(5, cut)
    client.generate(PROMPT)
    assert sum(recovery.stall_s for recovery in client.recoveries) > OUTAGE_S
