"""Which records a watcher relays to a peer that has not mentioned them."""

from __future__ import annotations

from typing import Any

from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb
from swarm_training.stages.peer.watch import _MAX_RELAYED, _UNMENTIONED_S, _Mentions


class Table:
    """A ``ProgressTable`` with records of so many peers."""

    def __init__(self, count: int) -> None:
        self.records = [Progress("toy", f"peer {number}") for number in range(count)]

    def heard(self, now: float) -> list[Progress]:
        return self.records

    def signed_of(self, peer_id: str) -> pb.SignedProgress:
        return signed(peer_id)


def signed(peer_id: str, version: int = 0) -> pb.SignedProgress:
    return pb.SignedProgress(progress=pb.Progress(peer_id=peer_id, version=version).SerializeToString())


def test_a_record_that_did_not_fit_into_a_call_is_news_when_the_peer_mentions_it() -> None:
    mentions, table, late_s = _Mentions(0.0), Table(_MAX_RELAYED + 1), _UNMENTIONED_S + 1.0
    to_read: Any = table
    relayed = mentions.lacking("callee", to_read, late_s)
    assert relayed == [signed(each.peer_id) for each in table.records[:-1]]
    mentions.note(relayed, late_s)  # as they came, which is no news
    assert mentions.lacking("callee", to_read, late_s) == relayed
    mentions.note([signed(each.peer_id, version=1) for each in table.records[:-1]], late_s)
    mentions.note([signed(table.records[-1].peer_id)], late_s)
    assert not mentions.lacking("callee", to_read, late_s)
