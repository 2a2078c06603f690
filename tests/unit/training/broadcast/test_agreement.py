"""What counts as heard in a phase: early by votes, late by signatures, and the same for all."""

from __future__ import annotations

import pytest

from swarm_training.broadcast.agreement import Agreement, most_cheaters
from swarm_training.broadcast.signed import SignedStatement, endorse, endorsers_of
from swarm_training.broadcast.wire import StatementSlot
from swarm_training.pb import training_robust_pb2 as pb
from tests.worlds.identities import identity

NAMES = [identity(number).peer_id for number in range(4)]
DEADLINE_S, SPREAD_S = 10.0, 2.0
RECEIPT = pb.Said.DESCRIPTOR.fields_by_name["receipt"].number


def said(number: int, missing: str = "") -> SignedStatement:
    receipt = pb.Receipt(missing=[missing] if missing else [])
    return SignedStatement.make(pb.Said(session=b"s", step=1, receipt=receipt), identity(number))


def vote(number: int, digests: tuple[bytes, ...]) -> SignedStatement:
    return SignedStatement.make(
        pb.Said(session=b"s", step=1, vote=pb.Vote(phase=RECEIPT, digests=digests)), identity(number)
    )


def agreement() -> Agreement:
    made = Agreement("receipt")
    made.open(NAMES, NAMES, DEADLINE_S, SPREAD_S)
    return made


def test_a_phase_is_over_once_enough_have_voted_for_what_is_here() -> None:
    ours = agreement()
    statements = {NAMES[number]: said(number) for number in range(4)}
    for statement in statements.values():
        assert ours.vote(1.0) is None and ours.take(statement, (), 1.0) and not ours.take(statement, (), 1.0)
    digests = ours.vote(1.0)
    assert digests == tuple(statements[name].digest for name in sorted(NAMES))
    assert ours.vote(1.0) is None, "once"
    for number in range(3):
        assert ours.outcome(1.0) is None
        assert ours.take(vote(number, digests), (), 1.0)
    assert ours.outcome(1.0) == statements


def test_votes_for_what_is_not_here_yet_wait_for_it() -> None:
    ours, statements = agreement(), {NAMES[number]: said(number) for number in range(4)}
    digests = tuple(statements[name].digest for name in sorted(NAMES))
    for number in range(3):
        ours.take(vote(number, digests), (), 1.0)
        ours.take(statements[NAMES[number]], (), 1.0)
    ours.take(said(3, "another"), (), 1.0)
    assert ours.outcome(1.0) is None
    ours.take(statements[NAMES[3]], (), 1.0)
    assert ours.outcome(1.0) == statements


@pytest.mark.parametrize(
    ("at", "endorsers", "counts"),
    [
        (10.0, (), True),
        (10.1, (), False),
        (12.0, (1,), True),
        (12.1, (1,), False),
        (13.0, (1, 2), False),  # one of four may cheat: two signatures are enough for all there is
        (11.0, (0,), False),  # its own
    ],
)
def test_late_statements_count_with_signatures_of_others(at: float, endorsers: tuple[int, ...], counts: bool) -> None:
    ours, statement = agreement(), said(0)
    endorsements = [endorse(statement, identity(number)) for number in endorsers]
    assert ours.take(statement, endorsers_of(statement, endorsements), at) == counts
    assert ours.outcome(ours.end_s) is None
    assert ours.outcome(ours.end_s + 0.1) == ({NAMES[0]: statement} if counts else {})


def test_of_two_statements_all_take_the_same_and_nobody_votes() -> None:
    first, second = said(0), said(0, "another")
    for order in ([first, second], [second, first]):
        ours = agreement()
        for statement in (*order, said(0, "a third"), *(said(number) for number in range(1, 4))):
            ours.take(statement, (), 1.0)
        assert ours.vote(1.0) is None
        heard = ours.outcome(13.0)
        assert heard is not None and heard[NAMES[0]].digest == min(first.digest, second.digest)
        assert {each.digest for each in ours.equivocations()[NAMES[0]]} == {first.digest, second.digest}


def test_endorsements_of_others_statements_do_not_count() -> None:
    statement = said(0)
    forged = pb.Endorsement(public_key=said(1).public_key, signature=statement.signature)
    assert endorsers_of(statement, [forged, endorse(said(1), identity(2))]) == {}


def test_most_must_have_spoken_where_most_were_expected() -> None:
    ours = agreement()
    assert ours.has_majority(NAMES[:3]) and not ours.has_majority(NAMES[:2])
    ours.open(NAMES[:1], NAMES, DEADLINE_S, SPREAD_S)
    assert ours.has_majority([])


def test_fewer_than_a_third_may_cheat() -> None:
    assert [most_cheaters(number) for number in (1, 3, 4, 7, 10)] == [0, 0, 1, 2, 3]


def test_places_tell_votes_from_what_they_are_on() -> None:
    assert said(0).place == StatementSlot(1, 0, "receipt")
    assert vote(0, ()).place == StatementSlot(1, 0, "vote on receipt")
    for nonsense in (pb.Said(step=1), pb.Said(vote=pb.Vote(phase=6)), pb.Said(vote=pb.Vote(phase=1))):
        with pytest.raises(ValueError, match=r"says nothing|on no phase"):
            _ = SignedStatement.make(nonsense, identity(0)).place
