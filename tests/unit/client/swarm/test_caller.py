"""Who a client is, to the DHT and to servers."""

from __future__ import annotations

from swarm_client.core.config import ClientConfig
from swarm_client.swarm.caller import ClientIdentity


def test_a_client_is_one_peer_as_long_as_it_lives() -> None:
    first, second = ClientIdentity(ClientConfig()), ClientIdentity(ClientConfig())
    peer_id = first.identity.peer_id
    assert first.credentials.peer_id == first.identity.peer_id == peer_id
    assert second.identity.peer_id != peer_id
