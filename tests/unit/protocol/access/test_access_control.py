"""Who is let into a private swarm: tokens that are right, and every way in which they can be wrong."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest

from swarm_protocol.access.access_control import CLOCK_SKEW_S, AccessControl
from swarm_protocol.access.organiser import OrganiserKey, SwarmKey
from swarm_protocol.access.tokens import MAX_TOKEN_BYTES, Grant, Revocation, Role
from swarm_protocol.errors import AccessDenied
from swarm_protocol.pb import swarm_pb2 as pb

KEY, OTHERS_KEY = OrganiserKey.generate(), OrganiserKey.generate()
START, END = 1_000_000.0, 2_000_000.0
NOW = 1_500_000.0
GRANT = Grant.new(KEY.public, Role.SERVER, "ada", "QmAda", START, END)


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def access(clock: Clock) -> AccessControl:
    return AccessControl(KEY.public, clock=clock)


def granted(role: Role) -> bytes:
    return dataclasses.replace(GRANT, role=role).signed(KEY)


def is_admitted(access: AccessControl, role: Role, token: bytes, peer_id: str = "QmAda") -> bool:
    try:
        access.require(role, peer_id, token)
    except AccessDenied:
        return False
    return True


# what members may do, row by row: server, client, trainer, moderator
MAY = {
    Role.SERVER: {Role.SERVER, Role.CLIENT, Role.TRAINER},
    Role.CLIENT: {Role.CLIENT},
    Role.TRAINER: {Role.CLIENT, Role.TRAINER},
    Role.MODERATOR: {Role.CLIENT, Role.TRAINER, Role.MODERATOR},
}


@pytest.mark.parametrize("role", Role)
def test_a_role_may_what_it_is_for(access: AccessControl, role: Role) -> None:
    assert {wanted for wanted in Role if is_admitted(access, wanted, granted(role))} == MAY[role]


def test_the_refusal_names_the_role(access: AccessControl) -> None:
    with pytest.raises(AccessDenied, match="the membership of ada is for the role client: expected trainer"):
        access.require(Role.TRAINER, "QmAda", granted(Role.CLIENT))


def test_nobody_comes_without_a_token(access: AccessControl) -> None:
    with pytest.raises(AccessDenied, match="takes only members"):
        access.require(Role.CLIENT, "QmAda", b"")


def test_a_token_is_of_no_use_to_who_has_seen_it(access: AccessControl) -> None:
    with pytest.raises(AccessDenied, match="belongs to another peer"):
        access.require(Role.CLIENT, "QmEve", GRANT.signed(KEY))


def test_another_organiser_makes_no_members(access: AccessControl) -> None:
    theirs = dataclasses.replace(GRANT, swarm_key=OTHERS_KEY.public)
    forged = GRANT.signed(OTHERS_KEY)  # says that it is of this swarm
    for token in (theirs.signed(OTHERS_KEY), forged, theirs.signed(KEY)):
        with pytest.raises(AccessDenied, match="its organiser has not signed"):
            access.require(Role.CLIENT, "QmAda", token)


def test_every_changed_byte_spoils_a_token(access: AccessControl) -> None:
    token = GRANT.signed(KEY)
    for index in range(len(token)):
        changed = bytearray(token)
        changed[index] ^= 1
        assert not is_admitted(access, Role.CLIENT, bytes(changed)), index
    for spoiled in (token[:-1], token + b"x", b"x" * (MAX_TOKEN_BYTES + 1), bytes(100), b"\xff"):
        assert not is_admitted(access, Role.CLIENT, spoiled)


def test_a_token_that_is_too_long_is_not_kept(access: AccessControl) -> None:
    token = bytes(MAX_TOKEN_BYTES + 1)
    before = sys.getrefcount(token)
    assert not is_admitted(access, Role.SERVER, token)
    assert sys.getrefcount(token) == before


def test_a_revocation_is_no_token_nor_a_token_a_revocation(access: AccessControl) -> None:
    """What is signed says what it is: the same bytes under the other's signature count for nothing."""
    assert not is_admitted(access, Role.CLIENT, Revocation(KEY.public, GRANT.id, END).signed(KEY))
    assert not access.revoke(GRANT.signed(KEY))
    as_grant = pb.Signed.FromString(GRANT.signed(KEY))
    with pytest.raises(ValueError, match="has not signed the grant"):
        Grant.parse(pb.Signed(content=as_grant.content, signature=KEY.sign(as_grant.content)).SerializeToString())


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (START - CLOCK_SKEW_S - 1, "has not begun"),
        (START - CLOCK_SKEW_S + 1, None),
        (END + CLOCK_SKEW_S - 1, None),
        (END + CLOCK_SKEW_S + 1, "has expired"),
    ],
)
def test_a_token_counts_in_its_time_give_or_take_a_minute(
    access: AccessControl, clock: Clock, now: float, sentence: str | None
) -> None:
    assert CLOCK_SKEW_S == 60
    assert is_admitted(access, Role.CLIENT, GRANT.signed(KEY))  # once it was checked, it still expires
    clock.now = now
    if sentence is None:
        access.require(Role.CLIENT, "QmAda", GRANT.signed(KEY))
    else:
        with pytest.raises(AccessDenied, match=sentence):
            access.require(Role.CLIENT, "QmAda", GRANT.signed(KEY))


class TestRevocations:
    REVOCATION = Revocation(KEY.public, GRANT.id, END).signed(KEY)

    def test_who_is_revoked_is_refused_and_others_are_not(self, access: AccessControl) -> None:
        other = Grant.new(KEY.public, Role.SERVER, "bob", "QmBob", START, END).signed(KEY)
        assert is_admitted(access, Role.CLIENT, GRANT.signed(KEY))
        assert access.revoke(self.REVOCATION)
        with pytest.raises(AccessDenied, match="the membership of ada was revoked"):
            access.require(Role.CLIENT, "QmAda", GRANT.signed(KEY))
        assert is_admitted(access, Role.CLIENT, other, "QmBob")

    def test_it_is_noted_once_and_kept_until_the_grant_expires(self, access: AccessControl, clock: Clock) -> None:
        assert access.revoke(self.REVOCATION)
        assert not access.revoke(self.REVOCATION)
        assert access.revocations() == {GRANT.id: self.REVOCATION}
        assert access.is_revocation(GRANT.id, self.REVOCATION)
        clock.now = END + CLOCK_SKEW_S + 1
        assert access.revocations() == {}
        assert not is_admitted(access, Role.CLIENT, GRANT.signed(KEY))  # it has expired anyway

    def test_only_the_organiser_revokes(self, access: AccessControl, clock: Clock) -> None:
        theirs = Revocation(OTHERS_KEY.public, GRANT.id, END)
        for data in (theirs.signed(OTHERS_KEY), theirs.signed(KEY), self.REVOCATION[:-1], b"", b"x" * 5000):
            assert not access.revoke(data)
            assert not access.is_revocation(GRANT.id, data)
        assert not access.is_revocation(bytes(16), self.REVOCATION)
        clock.now = END + CLOCK_SKEW_S + 1
        assert not access.revoke(self.REVOCATION)  # of no use any more


def test_a_swarm_that_is_open_to_clients_takes_members_alone_as_servers(clock: Clock) -> None:
    access = AccessControl(KEY.public, open_to_clients=True, clock=clock)
    assert {role for role in Role if is_admitted(access, role, b"", "QmEve")} == {Role.CLIENT, Role.TRAINER}
    assert access.is_server("QmAda", GRANT.signed(KEY))
    assert not access.is_server("QmEve", GRANT.signed(KEY))


class TestKeys:
    def test_a_swarm_key_is_52_letters_and_digits(self) -> None:
        text = str(KEY.public)
        assert re.fullmatch("[a-z2-7]{52}", text)
        assert SwarmKey.parse(f" {text.upper()}\n") == KEY.public

    @pytest.mark.parametrize("text", ["", "abc", "b" * 51 + "1", "b" * 60, "\x1b[2J", "ключ"])
    def test_what_is_none_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected the 52 letters and digits") as refusal:
            SwarmKey.parse(text)
        assert str(refusal.value).isprintable()

    def test_the_organisers_key_is_for_their_eyes_only_and_never_overwritten(self, tmp_path) -> None:
        path = tmp_path / "new" / "organiser.key"
        KEY.save(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert OrganiserKey.load(path).public == KEY.public
        with pytest.raises(ValueError, match="exists already"):
            OTHERS_KEY.save(path)
        assert OrganiserKey.load(path).public == KEY.public

    def test_no_key_is_one_sentence(self, tmp_path) -> None:
        with pytest.raises(ValueError, match="make one with `swarm keys create`"):
            OrganiserKey.load(tmp_path / "none")
        (tmp_path / "text").write_text("hello")
        with pytest.raises(ValueError, match="is no organiser's key"):
            OrganiserKey.load(tmp_path / "text")
        with pytest.raises(ValueError, match="cannot read"):
            OrganiserKey.load(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"name": ""}, {"name": "x" * 65}, {"name": "a\nb"}, {"peer_id": ""}, {"peer_id": "a b"}, {"expires_at": START},
     {"expires_at": float("inf")}, {"granted_at": float("nan")}, {"id": b"short"}],
)  # fmt: skip
def test_a_grant_is_checked(wrong: dict) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(GRANT, **wrong)
