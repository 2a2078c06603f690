"""Moderators' orders: who may give them, for how long, and that none is carried out twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm_protocol.access.access_control import CLOCK_SKEW_S, AccessControl
from swarm_protocol.access.tokens import Revocation, Role
from swarm_protocol.errors import AccessDenied
from swarm_training.core.moment import Moment
from swarm_training.ledger import orders as module
from swarm_training.ledger.contributions import Contribution
from swarm_training.ledger.orders import Ban, GoBack, ModeratorOrder, Orders
from swarm_training.pb import training_ledger_pb2 as pb
from tests.unit.training.ledger.members import ADA, DAY, EVE, MODERATOR, NOW, ORGANISER, Member


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def orders(clock: Clock | None = None) -> tuple[Orders, AccessControl, Clock]:
    clock = clock or Clock()
    access = AccessControl(ORGANISER.public, clock=clock)
    return Orders("run", access, clock), access, clock


def ban(
    lasts_s: float = 3600.0, peer: Member = EVE, by: Member = MODERATOR, now: float = NOW, run: str = "run"
) -> bytes:
    return ModeratorOrder.new(run, Ban(peer.peer_id, "sends noise"), now, lasts_s).signed(by.identity, by.token)


def go_back(step: int, rollbacks: int = 0) -> bytes:
    return ModeratorOrder.new("run", GoBack(step, rollbacks), NOW, 600.0).signed(MODERATOR.identity, MODERATOR.token)


def test_a_ban_lasts_until_it_expires() -> None:
    known, _, clock = orders()
    order = known.take(ban())
    assert order.action == Ban(EVE.peer_id, "sends noise")
    assert known.bans() == {EVE.peer_id: order}
    clock.now += 3600
    assert EVE.peer_id in known.bans() and len(known.signed()) == 1
    clock.now += 1
    assert known.bans() == {} and known.signed() == []


def test_the_longest_of_several_bans_counts() -> None:
    known, _, _ = orders()
    known.take(ban(100.0))
    longest = known.take(ban(900.0))
    known.take(ban(500.0))
    assert known.bans()[EVE.peer_id] == longest


def test_an_order_is_new_once_and_gone_when_it_has_expired() -> None:
    known, _, clock = orders()
    data = ban()
    assert known.take(data) is not None and known.take(data) is None
    assert known.take(known.signed()[0]) is None
    clock.now += 3601
    with pytest.raises(ValueError, match="the order has expired, or has not begun"):
        known.take(data)


def test_a_rollback_is_for_a_run_that_has_had_so_many() -> None:
    """A joiner who is handed the order afterwards does not go back again."""
    known, _, clock = orders()
    for step, rollbacks in ((300, 0), (200, 0), (700, 1)):
        known.take(go_back(step, rollbacks))
    due = [known.rollbacks_due(rollbacks) for rollbacks in range(3)]
    assert [sorted(steps.values()) for steps in due] == [[200, 300], [700], []] and due[1].keys() <= set(known.signed())
    clock.now += 601
    assert known.rollbacks_due(0) == {}


@pytest.mark.parametrize("role", [Role.TRAINER, Role.CLIENT, Role.SERVER])
def test_only_moderators_order(role: Role) -> None:
    known, _, _ = orders()
    with pytest.raises(AccessDenied, match=f"is for the role {role}: expected moderator"):
        known.take(ban(by=ADA.with_token(role=role)))
    with pytest.raises(AccessDenied, match="belongs to another peer"):
        known.take(ban(by=Member(ADA.identity, MODERATOR.grant, MODERATOR.token)))
    with pytest.raises(AccessDenied, match="takes only members"):
        known.take(ban(by=Member(MODERATOR.identity, MODERATOR.grant, b"")))
    with pytest.raises(AccessDenied, match="has expired"):
        known.take(ban(by=MODERATOR.with_token(expires_at=NOW - CLOCK_SKEW_S - 1)))
    assert known.bans() == {}


def test_a_moderator_who_is_revoked_has_banned_nobody() -> None:
    known, access, _ = orders()
    known.take(ban())
    assert access.revoke(Revocation(ORGANISER.public, MODERATOR.grant.id, NOW + DAY).signed(ORGANISER))
    assert known.bans() == {}
    with pytest.raises(AccessDenied, match="was revoked"):
        known.take(ban())


CHANGES: dict[str, Callable[[pb.Order], object]] = {
    "run": lambda order: setattr(order, "run", "run2"),
    "id": lambda order: setattr(order, "id", bytes(16)),
    "issued_at": lambda order: setattr(order, "issued_at", order.issued_at + 1),
    "expires_at": lambda order: setattr(order, "expires_at", order.expires_at + 1),
    "ban": lambda order: setattr(order.ban, "peer_id", ADA.peer_id),
    "go_back": lambda order: setattr(order.go_back, "rollbacks", 1),
}


@pytest.mark.parametrize("field", CHANGES)
def test_no_field_can_be_changed(field: str) -> None:
    known, _, _ = orders()
    signed = pb.SignedByPeer.FromString(go_back(200) if field == "go_back" else ban())
    content = pb.Order.FromString(signed.content)
    CHANGES[field](content)
    signed.content = content.SerializeToString(deterministic=True)
    with pytest.raises(ValueError, match="for run 'run2'" if field == "run" else "a signature of .* is wrong"):
        known.take(signed.SerializeToString())
    assert known.signed() == []


def test_what_else_is_no_order() -> None:
    known, _, _ = orders()
    contribution = Contribution("run", Moment(0, 1), MODERATOR.peer_id, 3).signed(MODERATOR.identity, MODERATOR.token)
    for data, reason in (
        (ban(run="other"), "the order is for run 'other', and not for 'run'"),
        (ban(now=NOW + CLOCK_SKEW_S + 1), "has not begun"),
        (contribution.SerializeToString(), "has no content|a signature|are no Order|an order's id"),
        (b"", "has no content"),
        (b"\xff", "the bytes are no SignedByPeer"),
        (bytes(1 << 20), "expected at most"),
    ):
        with pytest.raises(ValueError, match=reason):
            known.take(data)
    for action, reason in (
        (Ban("../x", ""), "is no peer id: expected one as `swarm train watch` shows"),
        (Ban(EVE.peer_id, "a\nb"), "the reason of a ban is"),
        (GoBack(-1, 0), "the step of a rollback is -1"),
    ):
        with pytest.raises(ValueError, match=reason):
            ModeratorOrder.new("run", action, NOW, 1.0)
    for size in (15, 17):
        with pytest.raises(ValueError, match=f"an order's id has {size} bytes: expected 16"):
            ModeratorOrder("run", bytes(size), NOW, NOW + 1.0, GoBack(1, 0))
    with pytest.raises(ValueError, match="expected a later end"):
        ModeratorOrder.new("run", GoBack(1, 0), NOW, 0.0)


def test_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ORDERS", 2)
    known, _, clock = orders()
    known.take(ban(10.0))
    known.take(ban(900.0))
    with pytest.raises(ValueError, match="there are 2 orders already"):
        known.take(ban())
    clock.now += 11
    assert known.take(ban()) is not None
