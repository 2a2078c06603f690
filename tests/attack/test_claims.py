"""What strangers write into the DHT is a claim: an honest client's tokens are right beside all of these."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa
from transformers import AutoModelForCausalLM

from swarm_client import DistributedModel
from swarm_client.core import background
from swarm_client.core.config import ClientConfig, Timeouts
from swarm_client.core.events import Event, Recovery
from swarm_protocol.dht.claims import MAX_PER_ADDRESS, NUM_SHARDS
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import ServerRecord, ServerState, models_key, servers_key
from swarm_protocol.dht.stored_records import subkey_of
from swarm_protocol.net.hivemind_parts import (
    DHTID,
    DHTNode,
    DHTRecord,
    MSGPackSerializer,
    PeerID,
    RSASignatureValidator,
    get_dht_time,
)
from swarm_protocol.net.identity import Identity, peer_id_of_key
from swarm_protocol.net.tls import Certificate
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksServicer, add_BlocksServicer_to_server
from swarm_protocol.process.local_registry import DEFAULT_SWARM
from tests.swarm.pair import ends_only_at_its_length, random_ids
from tests.swarm.processes import ServerProcess
from tests.unit.crowd import identities
from tests.zoo import save_checkpoint

PROMPT = random_ids(1, 9, seed=7)
NEW_TOKENS = 6
LIFETIME_S = 100.0
FOR_EVER_S = 10**7  # 115 days
NOWHERE = "nowhere.invalid:1"  # a public address as far as anybody can tell
OPTIONS = dict(attention_mask=torch.ones_like(PROMPT), max_new_tokens=NEW_TOKENS, do_sample=False)


class Stranger:
    """A node of the DHT with as many identities as it likes."""

    def __init__(self, initial_peer: str) -> None:
        self._target = PeerID.from_base58(initial_peer.rpartition("/p2p/")[2])
        joining = DHTNode.create(initial_peers=[initial_peer], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        self._node = background.run(joining)

    def store(self, keys: Sequence[str], owner: Identity, value: bytes, lifetime_s: float = LIFETIME_S) -> list[bool]:
        """Has the server store a value, signed by its owner; returns for each key whether it has."""
        signer, subkey = RSASignatureValidator(owner.private_key), subkey_of(owner)
        packed, expires_at = MSGPackSerializer.dumps(value), get_dht_time() + lifetime_s
        ids = [DHTID.generate(key) for key in keys]
        names = MSGPackSerializer.dumps(subkey)
        signed = [signer.sign_value(DHTRecord(one.to_bytes(), names, packed, expires_at)) for one in ids]
        storing = self._node.protocol.call_store(
            self._target, ids, signed, [expires_at] * len(ids), subkeys=[subkey] * len(ids)
        )
        return list(background.run(storing) or [False] * len(ids))

    def close(self) -> None:
        background.run(self._node.shutdown())


class Staller(BlocksServicer):
    """Takes sessions and steps, answers pings, and computes nothing."""

    num_steps = 0

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> None:
        await context.write(pb.SessionReply(opened=pb.Opened(max_step_tokens=1 << 20)))
        async for request in requests:
            self.num_steps += request.HasField("step")

    async def Progress(self, _request: Any, _context: Any) -> pb.SessionProgress:
        return pb.SessionProgress()

    async def Echo(self, _request: Any, _context: Any) -> pb.EchoReply:
        return pb.EchoReply()

    async def Describe(self, _request: Any, _context: Any) -> pb.ServerRecord:
        return pb.ServerRecord()


@dataclass(frozen=True)
class Besieged:
    """An honest server with the whole model, and what strangers need to know of it."""

    server: ServerProcess
    model: Path
    record: ServerRecord
    expected: torch.Tensor
    stranger: Stranger

    @property
    def key(self) -> str:
        return servers_key(DEFAULT_SWARM, self.record.model)

    @contextmanager
    def client(self, **options: Any) -> Iterator[Any]:
        """A new one, which knows nobody."""
        config = ClientConfig(initial_peers=(self.server.ready["peer"],), **options)
        with DistributedModel.from_pretrained(str(self.model), config=config) as remote:
            yield ends_only_at_its_length(remote)

    def forged(self, owner: Identity, **fields: Any) -> pb.ServerRecord:
        """Of a server that is better than the honest one, by what it says."""
        claims = dict(peer_id=owner.peer_id, tokens_per_s=1e6, forward_tokens_per_s=1e6, addresses=("127.0.0.1:1",))
        message = replace(self.record, **claims).to_proto()
        for name, value in fields.items():
            setattr(message, name, value)
        return message

    def publish(self, owner: Identity, message: pb.ServerRecord, lifetime_s: float = LIFETIME_S) -> bool:
        return self.stranger.store([self.key], owner, message.SerializeToString(), lifetime_s)[0]

    def withdraw(self, owners: Sequence[Identity]) -> None:
        for owner in owners:
            self.publish(owner, self.forged(owner, state=ServerState.OFFLINE.value), LIFETIME_S + 20)


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    directory = tmp_path_factory.mktemp("besieged")
    model = directory / "llama"
    save_checkpoint("llama", model)
    whole = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    fields = dict(model=str(model), blocks=f"0:{whole.config.num_hidden_layers}", quant="none", throughput=100.0)
    with ExitStack() as stack:
        server = ServerProcess(json.dumps(fields), cache=directory, module="tests.attack.attacked_server")
        stack.callback(server.kill)
        stranger = Stranger(server.ready["peer"])
        stack.callback(stranger.close)
        with DistributedModel.from_pretrained(str(model), initial_peers=[server.ready["peer"]]) as remote:
            (record,) = background.run(remote.blocks.swarm.view(0.0)).servers
        yield Besieged(server, model, record, whole.generate(PROMPT, **OPTIONS), stranger)


def short_key() -> Identity:
    owner = Identity.generate()
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    owner.private_key._private_key = owner.rsa_key = key
    owner.peer_id = peer_id_of_key(key.public_key())
    return owner


def test_records_that_contradict_the_model_or_hardware(besieged: Besieged) -> None:
    """One with 2^32-1 blocks stalled every server."""
    owners = list(itertools.islice(identities(8), 8))
    claims: list[dict[str, Any]] = [
        {"num_blocks": 2**32 - 1},
        {"num_blocks": besieged.record.num_blocks + 1},
        {"model": "another"},
        {"tokens_per_s": 1e30, "forward_tokens_per_s": 1e30},
        {"tokens_per_s": math.inf},
        {"quant": "q" * 500},
        {"max_request_bytes": 0},
        {"queue_delay_s": -1e9},
    ]
    stored = [
        besieged.publish(owner, besieged.forged(owner, **fields)) for owner, fields in zip(owners, claims, strict=True)
    ]
    assert all(stored)
    assert not besieged.publish(owners[0], besieged.forged(owners[0]), FOR_EVER_S)
    short = short_key()
    assert not besieged.publish(short, besieged.forged(short))
    with besieged.client() as remote:
        view = background.run(remote.blocks.swarm.view(0.0))
        believed = {owners[3].peer_id, owners[6].peer_id, besieged.record.peer_id}
        assert {server.peer_id for server in view.servers} == believed
        assert max(server.tokens_per_s for server in view.servers) < 1e6
        assert torch.equal(remote.generate(PROMPT, **OPTIONS), besieged.expected)
    besieged.withdraw(owners)


def test_a_models_list_that_strangers_write(besieged: Besieged) -> None:
    """An unsigned entry hid the swarm for 115 days."""
    keys = [models_key(DEFAULT_SWARM, shard) for shard in range(NUM_SHARDS)]
    owners = list(itertools.islice(identities(20), 20))
    for number, owner in enumerate(owners):
        forged = besieged.forged(owner, model=f"invented {number}").SerializeToString()
        assert not any(besieged.stranger.store(keys, owner, forged, FOR_EVER_S))
        assert all(besieged.stranger.store(keys, owner, forged))
    liar = besieged.forged(owners[0], num_blocks=99).SerializeToString()
    assert all(besieged.stranger.store(keys, owners[0], liar, LIFETIME_S + 5))

    async def listed() -> dict[str, int]:
        dht = await Dht.join(DEFAULT_SWARM, [besieged.server.ready["peer"]], Identity.generate())
        try:
            return await dht.models()
        finally:
            await dht.shutdown()

    models = background.run(listed())
    assert besieged.record.model in models  # one voice against one: either number, but it is there
    assert len(models) == 20  # all but the one that the first identity no longer speaks of
    for number, owner in enumerate(owners):
        gone = besieged.forged(owner, model=f"invented {number}", state=ServerState.OFFLINE.value)
        besieged.stranger.store(keys, owner, gone.SerializeToString(), LIFETIME_S + 10)
    assert background.run(listed()) == {besieged.record.model: besieged.record.num_blocks}


def test_two_hundred_identities_of_one_address(besieged: Besieged) -> None:
    owners = list(itertools.islice(identities(200), 200))
    for owner in owners:
        message = besieged.forged(owner)
        message.addresses[:] = [NOWHERE]
        besieged.publish(owner, message)
    with besieged.client(timeouts=Timeouts(connect_s=0.5)) as remote:
        swarm = remote.blocks.swarm
        assert len(background.run(swarm.view(0.0)).servers) == 201
        assert len(swarm._usable({})[0].servers) == MAX_PER_ADDRESS + 1
        assert torch.equal(remote.generate(PROMPT, **OPTIONS), besieged.expected)
    besieged.withdraw(owners)


@contextmanager
def served(service: BlocksServicer) -> Iterator[tuple[str, bytes]]:
    """Its address, and the fingerprint of its certificate."""
    certificate = Certificate.generate()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        add_BlocksServicer_to_server(service, server)
        port = server.add_secure_port("127.0.0.1:0", certificate.server_credentials())
        await server.start()
        return server, port

    server, port = background.run(start())
    try:
        yield f"127.0.0.1:{port}", certificate.fingerprint
    finally:
        background.run(server.stop(0))


def test_forty_servers_that_answer_pings_and_no_step(besieged: Besieged) -> None:
    """They cost one generation 246 s and its life."""
    owners, staller, events = list(itertools.islice(identities(40), 40)), Staller(), []
    on_event: Callable[[Event], None] = events.append
    with served(staller) as (address, fingerprint):
        for owner in owners:
            message = besieged.forged(owner, tls_fingerprint=fingerprint)
            message.addresses[:] = [address]
            assert besieged.publish(owner, message)
        with besieged.client(timeouts=Timeouts(stall_s=1.5), on_event=on_event) as remote:
            assert torch.equal(remote.generate(PROMPT, **OPTIONS), besieged.expected)
            recoveries = [event for event in events if isinstance(event, Recovery)]
            assert len(recoveries) == 1 and staller.num_steps > 1
            steps = staller.num_steps
            assert torch.equal(remote.generate(PROMPT, **OPTIONS), besieged.expected)
            assert staller.num_steps == steps and len(events) == len(recoveries)  # it has learned whom to take
        besieged.withdraw(owners)
