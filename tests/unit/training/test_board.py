"""The registry of a run's peers on a real DHT."""

from __future__ import annotations

from swarm_protocol.dht.node import Listening
from swarm_training.core.record import Progress
from swarm_training.core.signing import sign
from swarm_training.progress.board import DhtPeerRegistry
from tests.unit.support import until
from tests.worlds.identities import identity


async def test_one_late_reply_does_not_cut_a_peer_off() -> None:
    founder = await DhtPeerRegistry.join("toy", [], identity(0), Listening("127.0.0.1"), 10.0)
    joining = await DhtPeerRegistry.join("toy", await founder.addresses(), identity(1), Listening(None), 10.0)
    known = joining.node.protocol.routing_table.uid_to_peer_id
    record = sign(Progress("toy", identity(0).peer_id), identity(0))
    try:
        await founder.publish(record)
        usual_s, joining.node.protocol.wait_timeout = joining.node.protocol.wait_timeout, 1e-6
        assert await joining.read() == []
        await until(lambda: not known)
        joining.node.protocol.wait_timeout = usual_s
        assert await joining.read() == [record]
    finally:
        await joining.close()
        await founder.close()
