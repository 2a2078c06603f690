"""Broadcasts survive the wire, and what strangers write is bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm_training.broadcast import wire
from swarm_training.broadcast.signed import SignedStatement
from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.robust import messages as msg
from swarm_training.robust.btard import BtardSnapshot
from swarm_training.robust.instructions import Remove, StepRecord
from swarm_training.robust.roster import MemberRecord
from swarm_training.robust_run.standings import Standings, vouched
from tests.worlds.identities import identity

STAMP = ("peer", 3, 1)
ITEMS = (msg.Item(2, 0, "a", "b"), msg.Item(3, 1, "c", "d"))
ACCUSATIONS = (
    msg.Accusation(msg.FalseProjection("a", "b"), 1.5),
    msg.Accusation(msg.FalseGradient("c"), None),
    msg.Accusation(msg.FalseGradient("d"), 1e6),
)
MESSAGES: list[msg.BroadcastMessage] = [
    msg.Commitment(*STAMP, b"h" * 32, 1.25, (b"1" * 32, b"2" * 32)),
    msg.Receipt(*STAMP, ("a", "b")),
    msg.PartsOpened(*STAMP, ITEMS, (b"1", b"2")),
    msg.AggregateCommitted(*STAMP, b"d" * 32),
    msg.Reveal(*STAMP, b"seed", ("a",)),
    msg.AggregateOpened(*STAMP, b"d" * 32),
    msg.Projections(*STAMP, (1.0, -2.5)),
    msg.Accusations(*STAMP, ACCUSATIONS),
    msg.EvidenceOpened(*STAMP, ITEMS, (b"1", b"2")),
    msg.Measurements(*STAMP, ((1.0,), (2.0, 3.0), ())),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_broadcast_survives_the_wire(message: msg.BroadcastMessage) -> None:
    sent = SignedStatement.make(wire.to_said(message), identity(0))
    received = SignedStatement.from_proto(pb.Statement.FromString(sent.to_proto().SerializeToString()))
    assert wire.to_message("peer", received.said) == message
    assert received.sender == identity(0).peer_id and received.place.kind == wire.kind_of(type(message))
    has_data = isinstance(message, msg.PartsOpened | msg.EvidenceOpened | msg.AggregateOpened)
    assert bool(wire.digests_of(received.said)) == has_data


def test_what_is_not_signed_so_is_nobodys() -> None:
    sent = SignedStatement.make(wire.to_said(MESSAGES[0]), identity(0))
    for change in {"content": sent.content + b" "}, {"public_key": b""}:
        with pytest.raises(ValueError, match=r"a signature of Qm\w+ is wrong|the key of a statement is no key"):
            _ = replace(sent, **change).sender


def test_what_is_too_large_or_no_statement_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 524288 at most"):
        wire.parse(bytes(wire.MAX_SAID_BYTES + 1))
    with pytest.raises(ValueError, match="no statement"):
        wire.parse(b"\xff")
    with pytest.raises(ValueError, match="200 characters"):
        wire.to_message("peer", pb.Said(receipt=pb.Receipt(missing=["x" * 200])))


def test_standings_survive_the_wire() -> None:
    last = msg.RobustRound(6, 1, ("a", "b"), ("a",), 2.5, b"seed")
    snapshot = BtardSnapshot(
        {"a": MemberRecord(2), "b": MemberRecord(0, 1, 1)},
        StepRecord(last, {"a": (b"1", b"2")}, {"a": (1.0, 2.0)}),
        {"a": "b"},
        {"c": Remove("c", "slander", True)},
    )
    sent = Standings(b"s" * 32, 7, ("b",), snapshot, b"d" * 32, 99, b"r" * 32)
    assert Standings.parse(sent.to_bytes()) == sent
    for nonsense in (b"", b"\xff", b"\x10\x07"):
        with pytest.raises(ValueError, match="standings that peers have sent"):
            Standings.parse(nonsense)


def test_standings_are_believed_if_an_honest_founder_gives_them() -> None:
    founders = [str(number) for number in range(4)]
    assert vouched([b"a"], founders) is None and vouched([], founders) is None
    assert vouched([b"a", b"b", b"b"], founders) == b"b"
    assert vouched([b"a"], ["0", "1", "2"]) == b"a"
