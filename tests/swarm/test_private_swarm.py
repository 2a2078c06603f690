"""A private swarm of real servers: members generate as ever, all others are refused, while it runs and at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_cli.demo.local_cluster import LocalServer
from swarm_client import AccessDenied, ClientConfig, DistributedModel
from swarm_client.core import background
from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.pb import swarm_pb2 as pb
from tests.quick_keys import new_identity
from tests.swarm.harness import InProcessServers
from tests.swarm.organiser import Organiser
from tests.swarm.pair import random_ids
from tests.swarm.raw_client import Answer, RawClient
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.zoo import BLOCKS, save_checkpoint

OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
NEW_TOKENS = 6
SWARM = "members-only"


@dataclass
class Private(Organiser):
    """An organiser, and the process of a server that is a member and has all blocks."""

    model: Path
    server: LocalServer
    record: ServerRecord
    dht: Dht

    def config(self, membership: Path | None = None, **options: object) -> ClientConfig:
        peers = (self.server.ready["peer"],)
        return ClientConfig(initial_peers=peers, swarm=SWARM, membership=membership, draft="none", **options)

    def client(self, member: MemberCredentials | None = None, token: bytes | None = None) -> RawClient:
        if member is None:
            return RawClient(self.record, ClientCredentials(new_identity(), token or b""))
        return RawClient(self.record, ClientCredentials(member.identity, member.token))


@pytest.fixture(scope="module")
def private(cluster, tmp_path_factory) -> Iterator[Private]:
    model = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", model)
    swarm = Private.of(tmp_path_factory.mktemp("organiser"), model=model, server=None, record=None, dht=None)
    flags = ["--model", str(model), "--swarm", SWARM, "--quant", "none", "--throughput", "100", "--cache-tokens", "512"]
    membership = str(swarm.membership(Role.SERVER, "server"))
    swarm.server = server = cluster.start(*flags, "--blocks", f"0:{BLOCKS}", "--membership", membership)
    cluster.wait_ready([server])
    joining = Dht.join(SWARM, [server.ready["peer"]], new_identity(), access=AccessControl(swarm.key.public))
    swarm.dht = background.run(joining)
    (swarm.record,) = background.run(swarm.dht.view(model.name, BLOCKS)).servers
    yield swarm
    background.run(swarm.dht.shutdown())
    server.signal(signal.SIGTERM)
    assert server.wait_gone(DEADLINE_S)
    log = server.stderr.read_text()
    secret = Path(membership).read_text().splitlines()[1]
    assert f"only members of swarm {swarm.key.public} are let in" in log
    assert secret[30:60] not in log and "Traceback" not in log


def load(private: Private, **options: object):
    return DistributedModel.from_pretrained(str(private.model), config=private.config(**options))


def asked(client: RawClient) -> list[Answer]:
    """What a client may ask for, with nothing in it."""
    return [
        client.ask("Describe", pb.DescribeRequest()),
        client.ask("Echo", pb.EchoRequest()),
        client.ask("Progress", pb.ProgressRequest(session_key=bytes(16))),
        client.ask("Copy", pb.CopyRequest(session_key=bytes(16))),
        client.reroute(pb.RerouteRequest(session_key=bytes(16))),
        client.session(pb.SessionRequest(open=pb.Open())),
        client.forward(pb.ForwardRequest(forward=pb.Forward())),
        client.put_adapter(pb.PutAdapterRequest(part=b"x")),
    ]


def trained(client: RawClient) -> Answer:
    return client.backward(pb.BackwardRequest())


def pushed(client: RawClient) -> Answer:
    return client.push(pb.PushRequest(push_key=bytes(32)))


@pytest.mark.promise("members of a private swarm generate as in any other")
def test_a_member_generates_the_right_tokens(private):
    whole = AutoModelForCausalLM.from_pretrained(private.model, dtype=torch.float32)
    ids = random_ids(1, 5, seed=0)
    expected = whole.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    with load(private, membership=private.membership(Role.CLIENT, "ada")) as model:
        assert torch.equal(model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False), expected)


@pytest.mark.parametrize("knows_key", [False, True])
def test_who_is_no_member_is_denied_at_once(private, knows_key):
    """It would wait for servers for an hour."""
    with load(private, wait_timeout_s=3600.0, swarm_key=str(private.key.public) if knows_key else "") as model:
        with pytest.raises(AccessDenied, match="this swarm takes only members: ask its organiser"):
            model.generate(random_ids(1, 5, seed=0), max_new_tokens=2)
        with pytest.raises(AccessDenied), torch.no_grad():
            model(random_ids(1, 5, seed=0), use_cache=False)


@pytest.mark.promise("a private swarm lets in members only")
def test_every_call_is_denied_to_who_is_no_member(private):
    member = private.credentials(Role.TRAINER)
    other_swarm = Grant.new(OrganiserKey.generate().public, Role.CLIENT, "eve", "QmEve", 0.0, 1e12)
    for token in (b"", member.token, other_swarm.signed(private.key)):  # a token of somebody else is of no use
        with private.client(token=token) as stranger:
            answers = [*asked(stranger), trained(stranger), pushed(stranger)]
            assert {answer.status for answer in answers} == {DENIED}, answers


def test_a_role_may_no_more_than_it_is_for(private):
    def statuses(role: Role) -> tuple[set, bool, bool]:
        with private.client(private.credentials(role)) as client:
            asking = {answer.status for answer in asked(client)}
            return asking, trained(client).status is DENIED, pushed(client).status is DENIED

    for role, may_train, may_push in [
        (Role.CLIENT, False, False),
        (Role.TRAINER, True, False),
        (Role.MODERATOR, True, False),
        (Role.SERVER, True, True),
    ]:
        asking, train_denied, push_denied = statuses(role)
        assert OK in asking and DENIED not in asking
        assert (train_denied, push_denied) == (not may_train, not may_push)


@pytest.mark.promise("who is revoked is refused while the private swarm runs")
def test_who_is_revoked_is_refused_while_the_swarm_runs(private, capsys):
    path = private.membership(Role.CLIENT, "bob")
    ids = random_ids(1, 5, seed=0)
    with (
        load(private, membership=path) as model,
        load(private, membership=private.membership(Role.CLIENT, "eve")) as other,
    ):
        cache, others_cache = model.new_cache(), other.new_cache()
        with torch.no_grad():
            model(ids, past_key_values=cache)
            other(ids, past_key_values=others_cache)
        private.revoke("bob", SWARM, [private.server.ready["peer"]])
        assert capsys.readouterr().out.startswith("revoked bob (client, ")
        with torch.no_grad():
            with pytest.raises(AccessDenied, match="the membership of bob was revoked"):
                model(ids[:, :1], past_key_values=cache)
            other(ids[:, :1], past_key_values=others_cache)
    with load(private, membership=path) as again, pytest.raises(AccessDenied, match="was revoked"):
        again.generate(ids, max_new_tokens=1)


def test_a_swarm_that_is_open_to_clients(private):
    """The server is a member of the same swarm; its own flag says whom it lets in."""
    membership = private.membership(Role.SERVER, "open")
    with InProcessServers(private.model) as servers:
        servers.start(
            f"0:{BLOCKS}",
            swarm=SWARM,
            initial_peers=(private.server.ready["peer"],),
            membership=membership,
            open_to_clients=True,
        )
        peer_id = MemberCredentials.read(membership).grant.peer_id

        def record() -> ServerRecord | None:
            found = background.run(private.dht.view(private.model.name, BLOCKS)).servers
            return next((record for record in found if record.peer_id == peer_id), None)

        with RawClient(wait_for(record, "members see it"), ClientCredentials(new_identity())) as stranger:
            assert DENIED not in {answer.status for answer in asked(stranger)}
            assert pushed(stranger).status is DENIED
        own = ClientConfig(
            initial_peers=(private.server.ready["peer"],), swarm=SWARM, swarm_key=str(private.key.public)
        )
        ids = random_ids(1, 5, seed=0)
        with DistributedModel.from_pretrained(str(private.model), config=own) as model:  # the closed one is passed over
            assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 7)
    assert "SWARM_MEMBERSHIP" not in os.environ
