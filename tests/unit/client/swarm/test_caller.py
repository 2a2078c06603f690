"""Who a client is, to the DHT and to servers."""

from __future__ import annotations

from pathlib import Path

from swarm_client.core.config import ClientConfig
from swarm_client.swarm.caller import ClientIdentity
from swarm_protocol.net.identity import Identity


def test_a_client_is_one_peer_as_long_as_it_lives() -> None:
    first, second = ClientIdentity(ClientConfig()), ClientIdentity(ClientConfig())
    peer_id = first.identity.peer_id
    assert first.credentials.peer_id == first.identity.peer_id == peer_id
    assert second.identity.peer_id != peer_id


def test_processes_with_one_key_file_are_one_client_and_several_nodes_of_the_dht(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "key")
    first, second = (ClientIdentity(ClientConfig(identity=tmp_path / "key")) for _ in range(2))
    assert first.credentials.peer_id == second.credentials.peer_id
    assert first.identity.peer_id != second.identity.peer_id
