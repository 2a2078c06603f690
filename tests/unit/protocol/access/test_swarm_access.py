"""Which key and membership a server or client takes part with, and which files only one server may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_protocol.access.member_flags import ENVIRONMENT
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.access.tokens import Role
from tests.unit.protocol.access.test_membership import IDENTITY, KEY, member


def test_the_environment_has_a_membership_or_everybody_may_take_part(tmp_path: Path, monkeypatch) -> None:
    member(Role.TRAINER).write(tmp_path / "bob")
    monkeypatch.setenv(ENVIRONMENT, (tmp_path / "bob").read_text())
    assert SwarmAccess.of(Role.CLIENT, None).control.swarm_key == KEY.public
    with pytest.raises(ValueError, match="is for the role trainer: expected server"):
        SwarmAccess.of(Role.SERVER, None)
    monkeypatch.delenv(ENVIRONMENT)
    assert [SwarmAccess.of(role, None, IDENTITY) for role in (Role.CLIENT, Role.SERVER)] == [SwarmAccess(IDENTITY)] * 2


@pytest.mark.parametrize("role", [Role.SERVER, Role.CLIENT])
def test_a_membership_of_another_swarm_is_refused_before_a_key_file_is_made(role: Role, tmp_path: Path) -> None:
    member(role, identity=None).write(tmp_path / "ada")
    other = str(OrganiserKey.generate().public)
    with pytest.raises(ValueError, match=f"and not of swarm {other}"):
        SwarmAccess.of(role, tmp_path / "ada", tmp_path / "key", other)
    assert not (tmp_path / "key").exists()


def test_servers_do_not_share_a_file_with_a_key_and_clients_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_protocol.net.identity._LOCK_WAIT_S", 0.1)
    for role in (Role.SERVER, Role.CLIENT):
        member(role).write(tmp_path / str(role))
    server = SwarmAccess.of(Role.SERVER, tmp_path / "server", tmp_path / "key")
    assert server.identity.peer_id == IDENTITY.peer_id and not (tmp_path / "key").exists()
    with pytest.raises(ValueError, match="in use by another process"):
        SwarmAccess.of(Role.SERVER, tmp_path / "server")
    server.release()
    assert SwarmAccess.of(Role.SERVER, tmp_path / "server").lock is not None
    own = tmp_path / "own"
    for _ in range(2):  # a server that ends lets another one use its file
        SwarmAccess.of(Role.SERVER, None, own).release()
    assert [SwarmAccess.of(Role.CLIENT, tmp_path / "client").lock for _ in range(2)] == [None, None]
    with pytest.raises(ValueError, match="cannot use the identity file"):  # a client is told though it has another key
        SwarmAccess.of(Role.CLIENT, tmp_path / "client", tmp_path / "key")
