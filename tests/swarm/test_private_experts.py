"""Experts of a private swarm: members compute and train them, strangers are refused and not believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.tokens import Role
from swarm_protocol.errors import AccessDenied
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.process import network_loop
from swarm_training.experts import ExpertClient, ExpertServer, ExpertServerConfig, MixtureConfig, RemoteMixtureOfExperts
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.net.replica_calls import ReplicaCalls
from tests.quick_keys import new_identity
from tests.swarm.organiser import Organiser
from tests.swarm.processes import ServerProcess

HIDDEN, GRID = 8, (2, 3)
QUICK = MixtureConfig(refresh_s=0.2, ban_s=0.2)
CONFIG = ExpertServerConfig("demo", HIDDEN, GRID, 2, learning_rate=0.01, replicate_every_s=0.1)


@dataclass
class Private(Organiser):
    """An organiser, and a server that is a member and has two experts."""

    peers: list[str]

    def client(self, name: str, role: Role = Role.TRAINER) -> ExpertClient:
        return ExpertClient(self.peers, membership=self.membership(role, name))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    swarm = Private.of(tmp_path_factory.mktemp("organiser"), peers=[])
    config = replace(CONFIG, cells=((0, 0), (0, 1)))
    with ExpertServer(config, membership=swarm.membership(Role.SERVER, "server")) as server:
        swarm.peers = server.initial_peers
        yield swarm


def mixture(client: ExpertClient) -> RemoteMixtureOfExperts:
    return RemoteMixtureOfExperts(HIDDEN, GRID, 2, name="demo", client=client, config=QUICK)


def holder_seen_by(client: ExpertClient) -> ExpertHolder:
    return network_loop.run(client.board("demo", GRID, HIDDEN).read([(0,)]))[(0,)][0][0]


@pytest.mark.promise("in a private swarm members use experts by their roles, and strangers none")
def test_a_member_computes_and_trains_by_its_role(private: Private) -> None:
    rows = torch.randn(5, HIDDEN, requires_grad=True)
    with private.client("ada") as client:
        moe = mixture(client)
        moe(rows).sum().backward()
        assert rows.grad is not None and bool(moe.answered.any())
        moe.close()
    with private.client("bob", Role.CLIENT) as client:
        moe = mixture(client)
        outputs = moe(rows)
        assert outputs.shape == rows.shape
        with pytest.raises(AccessDenied, match="for the role client: expected trainer"):
            outputs.sum().backward()
        holder = holder_seen_by(client)
        with pytest.raises(AccessDenied, match="the membership of bob is for the role client: expected trainer"):
            network_loop.run(client.calls.backward(holder, "demo", (0, 0), rows.detach(), rows.detach()))
        moe.close()


def test_a_process_and_a_layer_take_a_membership(private: Private, tmp_path: Path) -> None:
    flags = ["serve", "--name", "other", "--hidden", str(HIDDEN), "--grid", *map(str, GRID), "--experts", "2"]
    flags += ["--membership", str(private.membership(Role.SERVER, "process")), "--initial-peers", *private.peers]
    known = {"initial_peers": private.peers, "membership": private.membership(Role.TRAINER, "eve")}
    with ServerProcess(*flags, cache=tmp_path, module="swarm_training.experts") as server:
        moe = RemoteMixtureOfExperts(HIDDEN, GRID, 2, name="other", config=QUICK, **known)
        assert moe(torch.zeros(1, HIDDEN)).shape == (1, HIDDEN)
        moe.close()
        assert server.terminate() == 0 and "Traceback" not in server.stderr


def test_strangers_are_refused_every_call(private: Private) -> None:
    rows = torch.zeros(1, HIDDEN)
    with private.client("carl") as client:
        holder = holder_seen_by(client)
        with pytest.raises(AccessDenied, match="for the role trainer: expected server"):
            credentials = ClientCredentials(*_key_of(private, "carl"))
            network_loop.run(_listed(credentials, holder))
    with ExpertClient(private.peers) as stranger:
        moe = mixture(stranger)
        with pytest.raises(AccessDenied, match="this swarm takes only members"):
            moe(rows)
        moe.close()
        with pytest.raises(AccessDenied, match="this swarm takes only members"):
            network_loop.run(stranger.calls.forward(holder, "demo", (0, 0), rows))
        with pytest.raises(AccessDenied, match="this swarm takes only members"):
            network_loop.run(stranger.calls.backward(holder, "demo", (0, 0), rows, rows))
    with pytest.raises(AccessDenied, match="this swarm takes only members"):
        network_loop.run(_listed(ClientCredentials(new_identity()), holder))


def _key_of(private: Private, name: str) -> tuple[Identity, bytes]:
    member = MemberCredentials.read(private.directory / f"{name}.membership")
    assert member is not None and member.identity is not None
    return member.identity, member.token


async def _listed(credentials: ClientCredentials, holder: ExpertHolder) -> object:
    calls = ReplicaCalls(credentials, "demo", GRID)
    try:
        return await calls.listed(holder)
    finally:
        await calls.close()
