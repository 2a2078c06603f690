"""Membership files: what is in them, and what is said of those that are wrong, without a secret in it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from swarm_protocol.access.member_flags import ENVIRONMENT
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.net.identity import Identity
from tests.quick_keys import new_identity

KEY = OrganiserKey.generate()
IDENTITY = new_identity()


def member(
    role: Role = Role.CLIENT, lasts_s: float = 1000.0, identity: Identity | None = IDENTITY
) -> MemberCredentials:
    now = time.time()
    peer_id = "QmOther" if identity is None else identity.peer_id
    grant = Grant.new(KEY.public, role, "ada", peer_id, now - 10_000, now + lasts_s)
    return MemberCredentials(grant, grant.signed(KEY), identity)


def test_a_file_gives_back_what_was_written_and_is_for_its_owner_only(tmp_path: Path) -> None:
    path, written = tmp_path / "ada.membership", member()
    written.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    read = MemberCredentials.read(path, {})
    assert (read.grant, read.token) == (written.grant, written.token)
    assert read.identity_or(None).to_bytes() == IDENTITY.to_bytes()
    with pytest.raises(ValueError, match="exists already"):
        member().write(path)


def test_the_environment_has_the_content_and_a_file_comes_first(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    member().write(one)
    member(Role.SERVER).write(other)
    environment = {ENVIRONMENT: one.read_text().splitlines()[1]}
    assert MemberCredentials.read(None, environment).grant.role is Role.CLIENT
    assert MemberCredentials.read(other, environment).grant.role is Role.SERVER
    assert MemberCredentials.read(None, {}) is None
    assert MemberCredentials.read(None, {ENVIRONMENT: " "}) is None


def test_secrets_are_shown_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "ada"
    member().write(path)
    secret = path.read_text().splitlines()[1]
    read = MemberCredentials.read(path, {})
    assert (
        "token" not in repr(read) and "identity" not in repr(read) and IDENTITY.to_bytes()[:20].hex() not in repr(read)
    )
    broken = secret[:200] + "!" + secret[200:]
    for text in (broken, secret[:-8], secret * 2, secret + "\n" + secret, "nothing", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match="has no membership in it: expected what `swarm keys grant`") as refusal:
            MemberCredentials.read(path, {})
        assert secret[30:60] not in str(refusal.value)
    with pytest.raises(ValueError, match=f"the environment variable {ENVIRONMENT} has no membership") as refusal:
        MemberCredentials.read(None, {ENVIRONMENT: broken})
    assert secret[30:60] not in str(refusal.value)
    with pytest.raises(ValueError, match=r"cannot read the membership file .*No such file"):
        MemberCredentials.read(tmp_path / "none", {})


def test_the_users_mistakes_are_found_before_a_server_does() -> None:
    member(Role.TRAINER).require(Role.CLIENT, KEY.public)
    with pytest.raises(ValueError, match="is for the role client: expected server"):
        member().require(Role.SERVER, None)
    with pytest.raises(ValueError, match="and not of swarm"):
        member().require(Role.CLIENT, OrganiserKey.generate().public)
    with pytest.raises(ValueError, match=r"the membership expired at .* UTC: ask the organiser"):
        member(lasts_s=-1).require(Role.CLIENT, None)


def test_a_membership_without_a_key_needs_the_one_it_is_for() -> None:
    without = member(identity=None)
    with pytest.raises(ValueError, match="is for peer QmOther: give its key file by --identity"):
        without.identity_or(None)
    with pytest.raises(ValueError, match=f"is for peer QmOther, and the key is that of {IDENTITY.peer_id}"):
        without.identity_or(IDENTITY)
    assert member().identity_or(new_identity()).peer_id == IDENTITY.peer_id
