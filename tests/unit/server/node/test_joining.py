"""How a server stays in one swarm with those who are noted beside it and with its initial peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_protocol.dht.local_registry import Notes
from swarm_server.core.config import ServerConfig
from swarm_server.node.joining import Membership
from tests.unit.support import run

OWN, NEAR, FAR = "/ip4/127.0.0.1/tcp/1/p2p/own", "/ip4/127.0.0.1/tcp/2/p2p/near", "/ip4/192.0.2.1/tcp/3/p2p/far"


class FakeDht:
    """A node that knows some peers, and is connected to those it is asked to."""

    def __init__(self, *known: str) -> None:
        self.peer_id = "own"
        self.known = set(known)

    def knows(self, peer_id: str) -> bool:
        return peer_id in self.known

    async def remember_peers(self) -> None:
        pass

    async def connect_to(self, addresses: list[str]) -> bool:
        self.known |= {address.rpartition("/p2p/")[2] for address in addresses}
        return True


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    notes = Notes("mine", tmp_path)
    notes.write("near", [NEAR])
    notes.write("far", [FAR])
    return notes


def met(notes: Notes, dht: FakeDht, own: str = OWN, **config: object) -> set[str]:
    """Whom the server meets when it looks around once; looking again, it finds that all is well."""
    before = set(dht.known)
    membership = Membership(ServerConfig(**config), notes, dht, [own])
    assert run(membership.keep()) == (dht.known != before)
    assert not run(membership.keep())
    return dht.known - before


def test_those_who_are_noted_and_not_known_are_met(notes: Notes) -> None:
    assert met(notes, FakeDht()) == {"near"}
    assert met(notes, FakeDht("near")) == set()


def test_servers_for_one_machine_alone_and_servers_of_a_network_stay_apart(notes: Notes) -> None:
    assert met(notes, FakeDht(), own="/ip4/192.0.2.2/tcp/1/p2p/own") == {"far"}


def test_initial_peers_are_met_again_wherever_they_are(notes: Notes) -> None:
    assert met(notes, FakeDht("near"), initial_peers=(FAR,)) == {"far"}


def test_in_a_large_swarm_few_strangers_are_asked_at_a_time(notes: Notes) -> None:
    for number in range(20):
        notes.write(f"peer{number}", [f"/ip4/127.0.0.1/tcp/9/p2p/peer{number}"])
    dht = FakeDht()
    membership = Membership(ServerConfig(), notes, dht, [OWN])
    counts = []
    while run(membership.keep()):
        counts.append(len(dht.known))
    assert counts == [3, 6, 9, 12, 15, 18, 21]


def test_the_note_is_kept_until_the_server_leaves(notes: Notes) -> None:
    membership = Membership(ServerConfig(), notes, FakeDht(), [OWN])
    assert OWN in notes.read()
    notes.remove("own")
    run(membership.keep())
    assert OWN in notes.read()
    membership.leave()
    assert OWN not in notes.read()


def test_a_server_that_cannot_be_noted_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine").write_text("no directory")
    membership = Membership(ServerConfig(), Notes("mine", tmp_path), FakeDht(), [OWN])
    run(membership.keep())
    membership.leave()
    assert caplog.text.count("others of this machine will not find this server by themselves") == 1
