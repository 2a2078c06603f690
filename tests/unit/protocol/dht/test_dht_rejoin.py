"""Nodes of the DHT that have lost all others, or never knew them, find them through an address."""

from __future__ import annotations

import pytest

from swarm_protocol.dht import bootstrap
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.net.hivemind_parts import ControlFailure
from tests.marks import SLOW
from tests.quick_keys import new_identity
from tests.unit.support import quiet_port, server_record, until
from tests.worlds.virtual_time import run_virtually

SWARM = "test"
HOST = "127.0.0.1"


async def sees(reader: Dht, *publishers: Dht) -> None:
    """Waits until the reader has a record of each."""

    async def all_are_there() -> bool:
        view = await reader.view("model", 8)
        return {publisher.peer_id for publisher in publishers} <= {server.peer_id for server in view.servers}

    await until(all_are_there)


async def lose(node: Dht) -> None:
    """The node notices that all it knew are gone."""

    async def alone() -> bool:
        await node.view("model", 8)
        return node.is_alone

    await until(alone)


async def test_a_client_finds_those_who_came_after_all_it_knew_were_gone() -> None:
    first = await Dht.join(SWARM, [], new_identity(), Listening(HOST))
    client = await Dht.join(SWARM, await first.addresses(), new_identity())
    assert not client.is_alone
    gone = await first.addresses()
    await first.shutdown()
    await lose(client)
    assert not await client.connect_to(gone)
    later = await Dht.join(SWARM, [], new_identity(), Listening(HOST))
    await later.publish(server_record(later.peer_id))
    assert await client.connect_to([*gone, *await later.addresses()])
    assert not client.is_alone
    await sees(client, later)
    for node in (client, later):
        await node.shutdown()


@SLOW  # libp2p does not dial for 5 s
async def test_a_client_finds_one_that_is_back_at_its_old_address() -> None:
    identity, port = new_identity(), quiet_port()
    first = await Dht.join(SWARM, [], identity, Listening(HOST, port))
    (address,) = await first.addresses()
    client = await Dht.join(SWARM, [address], new_identity())
    await first.shutdown()
    await lose(client)
    for _ in range(3):
        assert not await client.connect_to([address])
    again = await Dht.join(SWARM, [], identity, Listening(HOST, port))
    await again.publish(server_record(again.peer_id))
    assert await client.connect_to([address])
    await sees(client, again)
    for node in (client, again):
        await node.shutdown()


class Dialling:
    """Stands for a libp2p daemon that answers with errors, one after the other, before it connects."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self._client = self.p2p = self  # of a node, too

    async def connect(self, _peer: object, _transports: object) -> None:
        if self.answers:
            raise ControlFailure(self.answers.pop(0))


def test_libp2p_is_asked_again_while_it_does_not_dial() -> None:
    assert bootstrap._BACKOFF_S > 5.0
    busy = Dialling(*["failed to dial: dial backoff"] * round(bootstrap._BACKOFF_S / bootstrap._RETRY_S))
    run_virtually(bootstrap._connect(busy, None, None))
    assert not busy.answers
    other = Dialling("failed to dial: peer id mismatch", "never asked for")
    with pytest.raises(ControlFailure, match="mismatch"):
        run_virtually(bootstrap._connect(other, None, None))
    assert other.answers == ["never asked for"]


async def test_two_halves_become_one_swarm() -> None:
    nodes = [await Dht.join(SWARM, [], new_identity(), Listening(HOST)) for _ in range(2)]
    client = await Dht.join(SWARM, await nodes[0].addresses(), new_identity())
    for node in nodes:
        await node.publish(server_record(node.peer_id))
    assert len((await client.view("model", 8)).servers) == 1
    assert await nodes[0].connect_to(await nodes[1].addresses())
    assert not nodes[1].is_alone
    for node in nodes:  # as they do every minute
        await node.publish(server_record(node.peer_id))
    for reader in (client, *nodes):
        await sees(reader, *nodes)
    for node in (client, *nodes):
        await node.shutdown()


async def test_its_own_address_leads_nowhere() -> None:
    node = await Dht.join(SWARM, [], new_identity(), Listening(HOST))
    assert node.is_alone
    assert not await node.connect_to(await node.addresses())
    assert node.is_alone
    await node.shutdown()


async def test_a_server_that_others_cannot_reach_any_more_publishes_though_they_know_it() -> None:
    async def known(node: Dht, whom: Dht) -> bool:
        return node.knows(whom.peer_id)

    other = await Dht.join(SWARM, [], new_identity(), Listening(HOST))
    server = await Dht.join(SWARM, await other.addresses(), new_identity(), Listening(HOST))
    assert await server.publish(server_record(server.peer_id))
    await until(lambda: known(other, server))
    server.serve_others(False)  # from here on, the other one may tell it of itself
    assert await server.publish(server_record(server.peer_id))
    await sees(other, server)
    for node in (server, other):
        await node.shutdown()
