"""The libp2p daemon of a DHT node is killed: another takes its place, and nobody else notices for long."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from swarm_protocol.dht import dht
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from tests.quick_keys import new_identity
from tests.unit.protocol.dht.test_dht_rejoin import HOST, SWARM, sees
from tests.unit.support import server_record


async def kill_daemon(node: Dht) -> None:
    assert node.is_alive
    node._node.p2p._child.kill()
    await node.daemon_ended()
    assert not node.is_alive


async def test_it_is_the_same_peer_at_the_same_address_with_all_that_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    node = await Dht.join(SWARM, [], new_identity(), Listening(HOST))
    addresses = await node.addresses()
    other = await Dht.join(SWARM, addresses, new_identity(), Listening(HOST))
    await other.publish(server_record(other.peer_id))
    await other.shutdown()  # what it has published is with the node alone
    for _ in range(2):
        await kill_daemon(node)
        assert await node.addresses() == addresses
        with monkeypatch.context() as patch:  # hivemind waits for a daemon that is gone
            patch.setattr(dht, "_PUBLISH_TIMEOUT_S", 0.2)
            assert not await node.publish(server_record(node.peer_id))
        await node.restart()
        assert node.is_alive and await node.addresses() == addresses
    await node.restart()  # changes nothing
    assert await node.publish(server_record(node.peer_id))
    client = await Dht.join(SWARM, addresses, new_identity())
    await sees(client, node, other)
    for left in (client, node):
        await left.shutdown()


async def test_it_meets_those_again_that_it_knew() -> None:
    founder = await Dht.join(SWARM, [], new_identity(), Listening(HOST))
    member = await Dht.join(SWARM, await founder.addresses(), new_identity(), Listening(HOST))
    await member.remember_peers()
    await kill_daemon(member)
    await member.restart()
    assert not member.is_alone
    await member.publish(server_record(member.peer_id))
    await sees(founder, member)
    for node in (member, founder):
        await node.shutdown()


async def test_another_port_is_taken_if_somebody_else_listens_there_now() -> None:
    node = await Dht.join(SWARM, [], new_identity(), Listening(HOST))
    (address,) = await node.addresses()
    await kill_daemon(node)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((HOST, int(address.split("/")[4])))
        other.listen()
        await node.restart()
        (new,) = await node.addresses()
    assert new != address and new.endswith(f"/p2p/{node.peer_id}")
    client = await Dht.join(SWARM, [new], new_identity())
    for left in (client, node):
        await left.shutdown()


async def test_a_node_whose_daemon_is_gone_is_shut_down_at_once() -> None:
    node = await Dht.join(SWARM, [], new_identity(), Listening(HOST))
    control = Path(node._node.p2p._daemon_listen_maddr["unix"])
    assert control.exists()
    await kill_daemon(node)
    await asyncio.wait_for(node.shutdown(), 4.0)  # hivemind itself would wait for ever
    assert not control.exists()
