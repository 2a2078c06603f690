"""What servers publish of others: as much as a record has room for, and no more is read of anybody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from swarm_protocol.dht.notices.accusations import MAX_DOUBTED, MAX_EVIDENCE, AccusationRegistry
from swarm_protocol.dht.stored_records import items_of, store_item
from swarm_protocol.pb import swarm_pb2 as pb
from tests.quick_keys import new_identity
from tests.unit.protocol.dht.test_group_candidates import StoredItems
from tests.unit.support import run


def test_the_last_evidence_and_the_first_doubts_are_published_and_read() -> None:
    node, identity = StoredItems(), new_identity()
    accusations = AccusationRegistry(lambda: node, "swarm", "model", identity, None)  # type: ignore[arg-type,return-value]
    evidence = [pb.Evidence(hidden_size=number) for number in range(9)]
    doubted = [f"server {number}" for number in range(9)]
    assert run(accusations.publish(evidence, doubted, b""))
    (found,) = run(accusations.read())
    assert found == (
        identity.peer_id,
        pb.Accusations(evidence=evidence[-MAX_EVIDENCE:], doubted=doubted[:MAX_DOUBTED]),
    )
    ((item,),) = (items.values() for items in node.items.values())
    item.value = pb.Accusations(evidence=evidence, doubted=doubted).SerializeToString()  # who publishes more
    ((_, said),) = run(accusations.read())
    assert (len(said.evidence), len(said.doubted)) == (MAX_EVIDENCE, MAX_DOUBTED)
    item.value = pb.Accusations(evidence=evidence[:1]).SerializeToString()  # of a server that knows of no doubts
    assert run(accusations.read()) == [(identity.peer_id, pb.Accusations(evidence=evidence[:1]))]


def test_a_node_that_is_silent_has_stored_nothing_and_one_value_is_no_items() -> None:
    silent = SimpleNamespace(store=lambda *_, subkey: asyncio.sleep(9.0))
    assert run(store_item(silent, "key", "subkey", b"data", 1.0, timeout_s=0.0)) is False
    assert items_of(None) == items_of(SimpleNamespace(value=b"one value")) == {}
