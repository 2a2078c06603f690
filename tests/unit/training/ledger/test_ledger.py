"""Contributions: sums that anybody can check, and every way of tampering with them that was thought of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Role
from swarm_training.core.moment import Moment
from swarm_training.ledger.contributions import Contribution, countersign, verify_round
from swarm_training.ledger.ledger import Ledger, LedgerLimits, UserTotal
from swarm_training.ledger.signing import ContentKind, sign
from swarm_training.pb import training_ledger_pb2 as pb
from tests.unit.training.ledger.members import (
    ADA,
    BOB,
    DAY,
    EVE,
    MODERATOR,
    NOW,
    ORGANISER,
    Member,
    signed_rounds,
    summed,
)

LIMITS = LedgerLimits(max_samples=1000)


def entry(who: Member, samples: int, step: int = 7, run: str = "run", rollbacks: int = 0) -> pb.SignedByPeer:
    return Contribution(run, Moment(rollbacks, step), who.peer_id, samples).signed(who.identity, who.token)


def round_of(
    *entries: pb.SignedByPeer,
    leader: Member = ADA,
    step: int = 7,
    at: float = NOW,
    run: str = "run",
    rollbacks: int = 0,
) -> bytes:
    return countersign(run, Moment(rollbacks, step), entries, at, leader.identity, leader.token)


def a_round(step: int = 7, ada: int = 100, bob: int = 50) -> bytes:
    return round_of(entry(ADA, ada, step), entry(BOB, bob, step), step=step)


def test_totals_are_sums_by_user_in_whatever_order_rounds_come() -> None:
    rounds = [a_round(1, 100, 50), a_round(2, 1, 2), round_of(entry(BOB, 5, 3), entry(EVE, 7, 3), leader=EVE, step=3)]
    expected = {"ada": UserTotal(101, 2), "bob": UserTotal(57, 3), "eve": UserTotal(7, 1)}
    for order in itertools.permutations(rounds):
        assert summed("run", LIMITS, ORGANISER.public, [*order, order[0]]) == expected
    assert list(summed("run", LIMITS, ORGANISER.public, rounds)) == ["ada", "bob", "eve"]


def test_two_machines_of_a_user_are_one_user() -> None:
    second = EVE.with_token(name="ada")
    totals = summed("run", LIMITS, ORGANISER.public, [round_of(entry(ADA, 3), entry(second, 4))])
    assert totals == {"ada": UserTotal(7, 2)}


def test_what_was_added_can_be_handed_on() -> None:
    ledger = Ledger("run", LIMITS, ORGANISER.public)
    for step in (3, 1, 2):
        assert ledger.add(a_round(step)) is not None
    assert ledger.add(signed_rounds(ledger)[0]) is None
    assert [verify_round(data, ORGANISER.public).moment.step for data in signed_rounds(ledger)] == [1, 2, 3]
    assert summed("run", LIMITS, ORGANISER.public, signed_rounds(ledger)) == ledger.totals()


def tampered(change: Callable[[pb.Round], None]) -> bytes:
    """The round with something changed in its content, which nobody has signed again."""
    signed = pb.SignedByPeer.FromString(a_round())
    content = pb.Round.FromString(signed.content)
    change(content)
    signed.content = content.SerializeToString(deterministic=True)
    return signed.SerializeToString()


def test_unchanged_bytes_are_valid() -> None:
    assert verify_round(tampered(lambda _content: None), ORGANISER.public).credited[1].user == "bob"


@pytest.mark.parametrize("field", [field.name for field in pb.Round.DESCRIPTOR.fields])
def test_no_field_of_a_round_can_be_changed(field: str) -> None:
    changes = {"run": "other", "rollbacks": 1, "step": 8, "ended_at": NOW + 1}

    def change(content: pb.Round) -> None:
        if field == "contributions":
            del content.contributions[1]
        else:
            setattr(content, field, changes[field])

    with pytest.raises(ValueError, match=r"a signature of .* is wrong"):
        verify_round(tampered(change), ORGANISER.public)


@pytest.mark.parametrize("field", [field.name for field in pb.SignedByPeer.DESCRIPTOR.fields])
@pytest.mark.parametrize("whose", ["leader", "peer"])
def test_no_field_of_a_signature_can_be_changed(field: str, whose: str) -> None:
    """Each byte of it that was tried, and its absence; the leader signs the changed round of a peer itself."""
    for position in (None, 0, 40, -1):
        signed = pb.SignedByPeer.FromString(a_round())
        content = pb.Round.FromString(signed.content)
        target = signed if whose == "leader" else content.contributions[1]
        value = bytearray(getattr(target, field))
        if position is None:
            value = bytearray()
        else:
            value[position] ^= 2
        setattr(target, field, bytes(value))
        if whose == "peer":
            signed = sign(ContentKind.ROUND, content, ADA.identity, ADA.token)
        with pytest.raises(ValueError):
            verify_round(signed.SerializeToString(), ORGANISER.public)


@pytest.mark.parametrize("field", [field.name for field in pb.Contribution.DESCRIPTOR.fields])
def test_a_leader_cannot_change_a_contribution(field: str) -> None:
    changes = {"run": "other", "rollbacks": 1, "step": 8, "peer_id": EVE.peer_id, "samples": 51}
    changed = entry(BOB, 50)
    content = pb.Contribution.FromString(changed.content)
    setattr(content, field, changes[field])
    changed.content = content.SerializeToString(deterministic=True)
    with pytest.raises(ValueError, match=r"a signature of .* is wrong"):
        verify_round(round_of(entry(ADA, 100), changed), ORGANISER.public)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: round_of(entry(ADA, 1), entry(BOB, 1, step=6)), "to another run or step"),
        (lambda: round_of(entry(ADA, 1), entry(BOB, 1, run="other")), "to another run or step"),
        (lambda: round_of(entry(ADA, 1), entry(BOB, 1, rollbacks=1)), "to another run or step"),
        (lambda: round_of(entry(ADA, 1), entry(BOB, 0)), "a contribution has no samples"),
        (lambda: round_of(entry(ADA, 1), entry(BOB, 1), entry(BOB, 2)), "a peer twice"),
        (lambda: round_of(entry(ADA, 1), entry(BOB, 1), at=NOW + 2 * DAY), "does not let it train"),
        (lambda: round_of(entry(ADA, 1), entry(BOB, 1), at=float("nan")), "at which a round ended is no number"),
        (lambda: round_of(entry(ADA, 1), entry(BOB.with_token(role=Role.CLIENT), 1)), "does not let it train"),
        (lambda: round_of(entry(ADA, 1), entry(BOB.with_token(peer_id=EVE.peer_id), 1)), "does not let it train"),
        (
            lambda: round_of(entry(ADA, 1), entry(Member(BOB.identity, BOB.grant, b""), 1)),
            "the token of peer .* cannot be read",
        ),
        (
            lambda: round_of(entry(ADA, 1), entry(BOB, 1), leader=EVE.with_token(role=Role.CLIENT)),
            "does not let it train",
        ),
        (lambda: b"\xff\xff", "the bytes are no SignedByPeer"),
        (lambda: bytes(2 << 20), "has 2097152 bytes: expected at most"),
        (lambda: entry(ADA, 1).SerializeToString(), "a signature of .* is wrong|the bytes are no Round"),
    ],
)
def test_what_peers_and_leaders_may_not_sign(data: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        verify_round(data(), ORGANISER.public)


def test_a_contribution_of_another_is_nobodys() -> None:
    content = pb.Contribution(run="run", step=7, peer_id=BOB.peer_id, samples=5)
    forged = sign(ContentKind.CONTRIBUTION, content, EVE.identity, BOB.token)
    with pytest.raises(ValueError, match="is not signed by the peer that it names"):
        verify_round(round_of(entry(ADA, 1), forged), ORGANISER.public)


def test_members_of_another_swarm_are_none() -> None:
    with pytest.raises(ValueError, match="does not let it train in this run"):
        verify_round(a_round(), OrganiserKey.generate().public)


def test_without_an_organiser_peers_are_users() -> None:
    def open_entry(who: Member, samples: int) -> pb.SignedByPeer:
        return Contribution("run", Moment(0, 7), who.peer_id, samples).signed(who.identity)

    data = countersign("run", Moment(0, 7), [open_entry(ADA, 3), open_entry(BOB, 4)], NOW, ADA.identity)
    assert summed("run", LIMITS, None, [data]) == {BOB.peer_id: UserTotal(4, 1), ADA.peer_id: UserTotal(3, 1)}
    with pytest.raises(ValueError, match="shows a token, and the run has no organiser"):
        verify_round(a_round(), None)


def test_a_peer_is_credited_once_a_step_whoever_leads_and_in_whatever_order() -> None:
    """Rounds of one step: of a leader that failed, of the next, of another group, and of one that kept a contribution
    to a meeting which came to nothing."""
    rounds = [
        round_of(entry(ADA, 100), entry(BOB, 50)),
        round_of(entry(BOB, 50), entry(EVE, 7), leader=EVE),
        round_of(entry(EVE, 7), entry(MODERATOR, 1), leader=MODERATOR),
        round_of(entry(ADA, 90), entry(BOB.with_token(name="rob"), 20), leader=BOB),
    ]
    expected = {"ada": UserTotal(100, 1), "bob": UserTotal(50, 1), "eve": UserTotal(7, 1), "mo": UserTotal(1, 1)}
    for order in itertools.permutations(rounds):
        assert summed("run", LIMITS, ORGANISER.public, order) == expected
    ledger = Ledger("run", LIMITS, ORGANISER.public)
    assert ledger.add(rounds[0]) is not None and ledger.add(a_round()) is None  # signatures differ each time
    assert ledger.add(round_of(entry(ADA, 1, rollbacks=1), entry(BOB, 1, rollbacks=1), rollbacks=1)) is not None


def test_a_leader_that_took_no_part_countersigns_for_those_who_did() -> None:
    """It may be late at its own meeting; alone, nobody countersigns for itself."""
    assert summed("run", LIMITS, ORGANISER.public, [round_of(entry(ADA, 3), leader=EVE)]) == {"ada": UserTotal(3, 1)}
    with pytest.raises(ValueError, match="a round of 1 peers: expected at least 2"):
        summed("run", LIMITS, ORGANISER.public, [round_of(entry(ADA, 3), leader=ADA)])


def test_who_lacks_rounds_gets_those_and_no_others() -> None:
    there, here = (Ledger("run", LIMITS, ORGANISER.public) for _ in range(2))
    rounds = [a_round(step) for step in range(6)]
    for data in rounds:
        there.add(data)
    here.add(rounds[2])
    here.add(a_round(4, 200, 200))
    assert here.add(rounds[4]) is None  # it adds nothing, and need not come again
    since, known = here.seen(1000)
    assert since == Moment(0, 0)
    assert there.lacking(since, known, 1 << 20) == ([rounds[0], rounds[1], rounds[3], rounds[5]], False)
    assert there.lacking(Moment(0, 2), known, len(rounds[0]) + 100) == ([rounds[3]], True)
    assert here.seen(8) == (Moment(0, 5), b"")


def test_what_is_not_worth_a_look_at_its_signatures() -> None:
    ledger = Ledger("run", replace(LIMITS, keep_steps=2), ORGANISER.public)
    for step in range(3, 6):
        ledger.add(a_round(step))
    now = Moment(0, 6)
    assert ledger.wants(a_round(4), now) and ledger.wants(a_round(6), now)
    assert not ledger.wants(a_round(3), now) and not ledger.wants(a_round(7), now)
    assert not ledger.wants(signed_rounds(ledger)[0], now)
    with pytest.raises(ValueError, match="of another run"):
        ledger.wants(round_of(entry(ADA, 1, run="x"), run="x"), now)


def test_rounds_of_a_step_and_their_bytes_are_bounded() -> None:
    ledger = Ledger("run", replace(LIMITS, max_rounds=2), ORGANISER.public)
    for samples in (1, 2):
        ledger.add(a_round(1, samples, samples))
    with pytest.raises(ValueError, match="step 1 has 2 rounds already: expected no more"):
        ledger.add(a_round(1, 3, 3))
    small = Ledger("run", replace(LIMITS, keep_bytes=2 * len(a_round()) + 10), ORGANISER.public)
    for step in range(4):
        small.add(a_round(step))
    assert len(signed_rounds(small)) == 2 and small.totals()["ada"].rounds == 4


def test_limits_hold() -> None:
    ledger = Ledger("run", LedgerLimits(max_samples=100, keep_steps=3, max_users=2), ORGANISER.public)
    for data, reason in (
        (a_round(1, 101), "a contribution of 101 samples: expected at most 100"),
        (round_of(entry(ADA, 1)), "a round of 1 peers: expected at least 2"),
        (round_of(entry(ADA, 1), entry(BOB, 1), entry(EVE, 1)), "the ledger has 0 users already: expected no more"),
        (round_of(entry(ADA, 1, run="x"), entry(BOB, 1, run="x"), run="x"), "of another run"),
    ):
        with pytest.raises(ValueError, match=reason):
            ledger.add(data)
    assert ledger.totals() == {} and signed_rounds(ledger) == []
    for step in range(1, 7):
        ledger.add(a_round(step, 1, 1))
    assert len(signed_rounds(ledger)) == 3 and ledger.totals()["ada"] == UserTotal(6, 6)
    with pytest.raises(ValueError, match="the round of step 3 is too old for this ledger"):
        ledger.add(a_round(3, 1, 1))
