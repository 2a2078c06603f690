"""How a server stays in one swarm with those who are registered beside it and with its initial peers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.errors import NoSwarm
from swarm_protocol.process.local_registry import LocalRegistry
from swarm_server.core.config import ServerConfig
from swarm_server.node import joining, server
from swarm_server.node.joining import SwarmMembership
from swarm_server.reach import own_addresses
from tests.unit.support import run, server_record
from tests.worlds.identities import identity

OWN, NEAR, FAR = "/ip4/127.0.0.1/tcp/1/p2p/own", "/ip4/127.0.0.1/tcp/2/p2p/near", "/ip4/192.0.2.1/tcp/3/p2p/far"


class FakeDht:
    """A node that knows some peers, and is connected to those it is asked to."""

    def __init__(self, *known: str) -> None:
        self.peer_id = "own"
        self.known = set(known)
        self.serves_others = True

    def knows(self, peer_id: str) -> bool:
        return peer_id in self.known

    async def addresses(self) -> list[str]:
        return [OWN]

    async def remember_peers(self) -> None:
        pass

    async def connect_to(self, addresses: list[str]) -> bool:
        self.known |= {address.rpartition("/p2p/")[2] for address in addresses}
        return True


@pytest.fixture
def registry(tmp_path: Path) -> LocalRegistry:
    registry = LocalRegistry("mine", tmp_path)
    registry.write("near", [NEAR])
    registry.write("far", [FAR])
    return registry


def met(registry: LocalRegistry, dht: FakeDht, own: str = OWN, **config: object) -> set[str]:
    """Whom the server meets when it looks around once; looking again, it finds that all is well."""
    before = set(dht.known)
    membership = SwarmMembership(ServerConfig(**config), registry, dht, [own])
    assert run(membership.keep()) == (dht.known != before)
    assert not run(membership.keep())
    return dht.known - before


def test_those_who_are_registered_and_not_known_are_met(registry: LocalRegistry) -> None:
    assert met(registry, FakeDht()) == {"near"}
    assert met(registry, FakeDht("near")) == set()


def test_servers_for_one_machine_alone_and_servers_of_a_network_stay_apart(registry: LocalRegistry) -> None:
    assert met(registry, FakeDht(), own="/ip4/192.0.2.2/tcp/1/p2p/own") == {"far"}


def test_initial_peers_are_met_again_wherever_they_are(registry: LocalRegistry) -> None:
    assert met(registry, FakeDht("near"), initial_peers=(FAR,)) == {"far"}


def test_in_a_large_swarm_few_strangers_are_asked_at_a_time(registry: LocalRegistry) -> None:
    for number in range(20):
        registry.write(f"peer{number}", [f"/ip4/127.0.0.1/tcp/9/p2p/peer{number}"])
    dht = FakeDht()
    membership = SwarmMembership(ServerConfig(), registry, dht, [OWN])
    counts = []
    while run(membership.keep()):
        counts.append(len(dht.known))
    assert counts == [3, 6, 9, 12, 15, 18, 21]


def test_the_entry_is_kept_until_the_server_leaves(registry: LocalRegistry) -> None:
    membership = SwarmMembership(ServerConfig(), registry, FakeDht(), [OWN])
    assert OWN in registry.read()
    registry.remove("own")
    run(membership.keep())
    assert OWN in registry.read()
    membership.leave()
    assert OWN not in registry.read()


def test_a_server_that_cannot_be_registered_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine").write_text("no directory")
    membership = SwarmMembership(ServerConfig(), LocalRegistry("mine", tmp_path), FakeDht(), [OWN])
    run(membership.keep())
    membership.leave()
    assert caplog.text.count("others of this machine will not find this server by themselves") == 1


def test_a_server_that_serves_nobody_and_was_given_no_peer_names_its_own_address(
    registry: LocalRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    own, dht = "/ip4/192.0.2.2/tcp/1/p2p/own", FakeDht()
    dht.serves_others = False  # the others cannot reach it; it has joined through a server of its machine
    membership = SwarmMembership(ServerConfig(), registry, dht, [own], host="192.0.2.2")
    access, loader = SimpleNamespace(control=None), SimpleNamespace(members=1)
    devices, dtype = (torch.device("cpu"),), torch.float32
    starting = SimpleNamespace(config=ServerConfig(), devices=devices, dtype=dtype, loader=loader, access=access)
    joined: Any = SimpleNamespace(starting=starting, membership=membership)
    with caplog.at_level(logging.INFO):
        run(server._announce_ready(joined, server_record("own"), 1024))
    assert f" --initial-peers {own}" in caplog.text


def test_a_daemon_that_does_not_start_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(FakeDht):
        num_restarts = 0

        async def restart(self) -> None:
            self.num_restarts += 1
            raise NoSwarm("the libp2p daemon did not start: no memory")

    monkeypatch.setattr(joining, "_RESTARTS_S", (0.0, 0.01))
    dht = Dead()
    membership = SwarmMembership(ServerConfig(), LocalRegistry("mine", tmp_path), dht, [OWN])
    with pytest.raises(NoSwarm, match="cannot be started again: the libp2p daemon did not start: no memory"):
        run(membership.restart_daemon())
    assert dht.num_restarts == 2


HOST, LAN = "192.168.1.5", "/ip4/192.168.1.7/tcp/3/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class FakeDiscovery:
    """A local network with these members."""

    def __init__(self, *members: str) -> None:
        self.found = list(members)
        self.advertised: list[list[str]] = []

    def members(self) -> list[str]:
        return self.found

    async def advertise(self, peer_id: str, addresses: list[str]) -> bool:
        assert peer_id == "own"
        self.advertised.append(addresses)
        return True


class JoiningDht(FakeDht):
    """Its libp2p daemon can be started again, somewhere else."""

    at = OWN

    async def addresses(self) -> list[str]:
        return [self.at]

    async def shutdown(self) -> None:
        pass

    async def restart(self) -> None:
        pass


def joined(
    monkeypatch: pytest.MonkeyPatch, registry: LocalRegistry, discovery: FakeDiscovery | None, **config: object
) -> SwarmMembership:
    async def discover(*_: object) -> FakeDiscovery | None:
        return discovery

    async def join_dht(*_: object, **_options: object) -> JoiningDht:
        return JoiningDht()

    async def story() -> SwarmMembership:
        async with AsyncExitStack() as cleanup:
            given = ServerConfig(model="none", discover=discovery is not None, **config)
            return await joining.join(given, SwarmAccess(identity(0)), cleanup)

    monkeypatch.setattr(joining, "LocalRegistry", lambda _swarm: registry)
    monkeypatch.setattr(joining, "_discover", discover)
    monkeypatch.setattr(joining, "_host", lambda *_: HOST)
    monkeypatch.setattr(joining, "claimed", lambda *_: nullcontext())
    monkeypatch.setattr(joining.Dht, "join", join_dht)
    return run(story())


@pytest.mark.parametrize("found", ["discovered", "registered", "given"])
def test_a_server_stays_in_the_network_by_which_it_has_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: str
) -> None:
    ways = {"192.168.1.7": HOST}
    monkeypatch.setattr(own_addresses, "source_address", lambda host: ways.get(host, "10.8.0.2"))
    registry, discovery = LocalRegistry("mine", tmp_path), FakeDiscovery(LAN) if found == "discovered" else None
    if found == "registered":
        registry.write("lan", [LAN])
    membership = joined(monkeypatch, registry, discovery, initial_peers=(LAN,) if found == "given" else ())
    own = membership.own_addresses()
    assert own.moved() is None
    ways["192.168.1.7"] = "192.168.1.9"
    assert own.moved() == "192.168.1.9"


def test_who_moves_is_discovered_at_the_new_address(monkeypatch: pytest.MonkeyPatch, registry: LocalRegistry) -> None:
    discovery = FakeDiscovery(FAR)
    membership = joined(monkeypatch, registry, discovery)
    run(membership.restart_daemon())
    membership.dht.at = moved = OWN.replace("tcp/1", "tcp/9")
    run(membership.restart_daemon())
    assert discovery.advertised == [[OWN], [moved]]


@pytest.mark.parametrize(
    ("fields", "host"),
    [
        ({}, "127.0.0.1"),
        ({"discover": True}, HOST),
        ({"discover": True, "host": "0.0.0.0"}, "0.0.0.0"),
        ({"discover": True, "host": "192.0.2.7"}, "192.0.2.7"),
    ],
)
def test_where_a_server_listens(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], host: str) -> None:
    monkeypatch.setattr(joining, "lan_address", lambda: HOST)
    assert joining._host(ServerConfig(model="none", **fields), [], []) == host


def test_a_server_for_this_machine_alone_cannot_be_discovered() -> None:
    with pytest.raises(ValueError, match=r"discover lets others find this server, and host 127\.0\.0\.1 is for this"):
        run(joining._discover(ServerConfig(model="none", discover=True, host="127.0.0.1"), AsyncExitStack()))


@pytest.mark.parametrize(("config", "starts"), [({}, True), ({"initial_peers": (LAN,)}, False)])
def test_a_false_answer_on_the_local_network_keeps_no_server_from_its_swarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], starts: bool
) -> None:
    tried: list[Sequence[str]] = []

    async def join_through(peers: Sequence[str], *_: object) -> FakeDht:
        tried.append(peers)
        if peers:
            raise NoSwarm("no initial peer answered")
        return FakeDht()

    config = ServerConfig(model="none", discover=True, **config)
    joins = joining._join_any(config, (LAN,), LocalRegistry("mine", tmp_path), join_through)
    if starts:
        run(joins)
        assert "found on the local network, but no initial peer answered" in caplog.text
    else:
        with pytest.raises(NoSwarm):
            run(joins)
    assert tried == [(LAN,), []][: 1 + starts]
