"""``swarm keys`` as an organiser types it: what is written, what is printed, and who may read it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_cli.command_line import main, parse_args
from swarm_client.core.access import client_access
from swarm_client.core.config import ClientConfig
from swarm_protocol.access.member_flags import ENVIRONMENT
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.tokens import Role
from swarm_server.core.access import server_access
from swarm_server.core.config import ServerConfig
from tests.unit.support import refusal

Keys = Callable[..., str]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Keys:
    """Runs ``swarm keys ARGUMENTS`` in an empty directory, for a user without files; returns what it prints."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments: str) -> str:
        main(["keys", *arguments])
        return capsys.readouterr().out

    return run


def grant(keys: Keys, role: str, name: str, *more: str) -> str:
    return keys("grant", "--role", role, "--name", name, "--days", "30", *more).strip()


def test_each_key_has_its_own_list_of_grants(keys: Keys) -> None:
    for key, name in (("a.key", "first"), ("a.pem", "second")):
        keys("create", "--out", key)
        grant(keys, "client", name, "--key", key)
    for key, name in (("a.key", "first"), ("a.pem", "second")):
        assert [entry["name"] for entry in json.loads(keys("list", "--json", "--key", key))] == [name]


def test_a_list_of_grants_at_its_old_place_is_taken_over(keys: Keys) -> None:
    keys("create", "--out", "a.key")
    grant(keys, "client", "old", "--key", "a.key")
    Path("a.key.grants").rename("a.grants")
    assert [entry["name"] for entry in json.loads(keys("list", "--json", "--key", "a.key"))] == ["old"]
    grant(keys, "client", "new", "--key", "a.key")
    assert [entry["name"] for entry in json.loads(keys("list", "--json", "--key", "a.key"))] == ["old", "new"]


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"id": 1}', b"\xff\xfe"])
def test_a_damaged_list_of_grants_is_named(keys: Keys, capsys, line: bytes) -> None:
    keys("create", "--out", "a.key")
    Path("a.key.grants").write_bytes(line)
    said = refusal(capsys, lambda: keys("list", "--key", "a.key"))
    assert "a.key.grants is damaged: expected a line of JSON for each grant" in said


def test_a_key_is_made_once_and_its_public_half_printed(keys: Keys, tmp_path: Path, capsys) -> None:
    assert re.fullmatch("[a-z2-7]{52}\n", keys("create"))
    path = tmp_path / "config" / "swarm" / "organiser.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "exists already" in refusal(capsys, lambda: keys("create"), 1)
    assert re.fullmatch("[a-z2-7]{52}\n", keys("create", "--out", "other.key"))
    assert Path("other.key").stat().st_mode & 0o777 == 0o600


def test_a_grant_is_one_file_that_makes_a_member(keys: Keys, capsys) -> None:
    swarm_key = keys("create").strip()
    path = Path(grant(keys, "server", "ada"))
    assert path == Path("ada.membership") and path.stat().st_mode & 0o777 == 0o600
    access = server_access(ServerConfig(membership=path))
    access.control.require(Role.SERVER, access.identity.peer_id, access.token)
    assert str(access.control.swarm_key) == swarm_key
    found = MemberCredentials.read(path, {}).grant
    assert (found.name, found.role) == ("ada", Role.SERVER)
    assert abs(found.expires_at - time.time() - 30 * 24 * 3600) < 3600
    assert "exists already" in refusal(
        capsys, lambda: keys("grant", "--role", "client", "--name", "ada", "--days", "1"), 1
    )
    assert len(json.loads(keys("list", "--json"))) == 1  # no other than what was written


def test_a_member_with_a_key_of_its_own_gets_a_file_without_a_secret(keys: Keys) -> None:
    keys("create")
    peer_id = keys("identity", "bob.key").strip()
    assert keys("identity", "bob.key").strip() == peer_id
    path = Path(grant(keys, "client", "Bob of the café", "--peer", peer_id, "--out", "bob"))
    assert MemberCredentials.read(path, {}).identity is None
    config = ClientConfig(membership=path, identity=Path("bob.key"))
    for _ in range(2):  # several processes may come as one member
        access = client_access(config)
        access.control.require(Role.CLIENT, peer_id, access.token)
        assert access.identity.peer_id == peer_id
    with pytest.raises(ValueError, match="give its key file by --identity"):
        client_access(ClientConfig(membership=path))


def test_the_list_shows_what_became_of_every_grant(keys: Keys, capsys) -> None:
    keys("create")
    for role, name in [("server", "ada"), ("trainer", "bob"), ("client", "eve")]:
        grant(keys, role, name)
    said = refusal(capsys, lambda: keys("revoke", "eve", "--swarm", "that-does-not-run"), 1)
    assert "the swarm has not received the revocation" in said and "swarm keys publish" in said
    rows = [re.split(r"\s\s+", line) for line in keys("list").splitlines()]
    assert rows[0] == ["name", "role", "expires", "state", "peer", "id"]
    assert [(row[0], row[1], row[3]) for row in rows[1:]] == [
        ("ada", "server", "valid"),
        ("bob", "trainer", "valid"),
        ("eve", "client", "revoked"),
    ]
    assert [entry["id"] for entry in json.loads(keys("list", "--json"))] == [row[5] for row in rows[1:]]
    secret = Path("ada.membership").read_text().splitlines()[1][40:80]
    for path in Path().resolve().parent.rglob("*"):
        assert path.suffix == ".membership" or not path.is_file() or secret not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("grant", "--role", "boss", "--name", "a", "--days", "1"), "role 'boss' is unknown: expected one of server"),
        (("grant", "--role", "client", "--name", "a", "--days", "0"), "--days is 0: expected a number above 0"),
        (("grant", "--role", "client", "--name", "a", "--days", "nan"), "--days is nan"),
        (("grant", "--role", "client", "--name", "../a", "--days", "1"), "cannot be that of a file: give a file"),
        (("grant", "--role", "client", "--name", "a", "--days", "1", "--peer", "me"), "'me' is no peer id"),
        (("grant", "--role", "client", "--name", "a", "--days", "1", "--key", "none"), "there is no organiser's key"),
        (("revoke", "nobody", "--swarm", "/"), "swarm name '/' is not usable"),
    ],
)
def test_mistakes_are_one_sentence(keys: Keys, capsys, arguments: tuple[str, ...], sentence: str) -> None:
    keys("create")
    assert sentence in refusal(capsys, lambda: keys(*arguments), 2)
    assert list(Path().iterdir()) == []


def test_who_was_never_granted_is_not_revoked(keys: Keys, capsys) -> None:
    keys("create")
    assert "there is no grant of 'nobody'" in refusal(capsys, lambda: keys("revoke", "nobody"), 1)


def test_a_swarm_key_alone_makes_a_client_that_trusts_members_only(keys: Keys) -> None:
    swarm_key = keys("create").strip()
    access = client_access(ClientConfig(swarm_key=swarm_key))
    assert access.token == b"" and str(access.control.swarm_key) == swarm_key
    with pytest.raises(ValueError, match="a server of a private swarm must be a member of it"):
        server_access(ServerConfig(swarm_key=swarm_key))
    with pytest.raises(ValueError, match="--open-to-clients with --membership"):
        server_access(ServerConfig(open_to_clients=True))


@pytest.mark.parametrize("action", ["revoke", "publish"])
def test_a_swarm_is_found_on_the_local_network_too(action: str) -> None:
    command = ["keys", action, *(["ada"] if action == "revoke" else [])]
    assert parse_args([*command, "--discover"]).discover and not parse_args(command).discover
