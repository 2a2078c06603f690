"""What strangers write into the DHT is a claim: an honest client's tokens are right beside all of these."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa

from swarm_client.core import background
from swarm_client.core.config import Timeouts
from swarm_client.core.events import Event, Recovery
from swarm_protocol.dht.claims import MAX_PER_ADDRESS, NUM_SHARDS
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import ServerState, models_key
from swarm_protocol.net.hivemind_parts import RSAPrivateKey
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import Certificate
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.process.local_registry import DEFAULT_SWARM
from tests.attack.attacks import attack
from tests.attack.besieged import Besieged, besieged
from tests.attack.honest import OPTIONS, PROMPT
from tests.quick_keys import new_identity
from tests.worlds.partial_service import serve_methods

FOR_EVER_S = 10**7  # 115 days
NOWHERE = "nowhere.invalid:1"  # a public address as far as anybody can tell


class Staller:
    """Takes sessions, steps and passes, answers pings, and computes nothing."""

    num_steps = num_passes = 0

    async def Forward(self, requests: AsyncIterator[Any], _context: Any) -> None:
        async for _ in requests:
            pass
        self.num_passes += 1
        await asyncio.Event().wait()

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


@pytest.fixture(scope="module")
def besieged_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    with besieged(tmp_path_factory.mktemp("besieged")) as target:
        yield target


@pytest.fixture
def target(besieged_server: Besieged) -> Iterator[Besieged]:
    with besieged_server.while_an_honest_client_generates():
        yield besieged_server


def short_key() -> Identity:
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return Identity(key)


@pytest.mark.promise("what strangers write about servers does no harm")
@attack("records that contradict the model", besieged)
def test_records_that_contradict_the_model_or_hardware(target: Besieged) -> None:
    """One with 2^32-1 blocks stalled every server."""
    owners = target.owners(8)
    claims: list[dict[str, Any]] = [
        {"num_blocks": 2**32 - 1},
        {"num_blocks": target.record.num_blocks + 1},
        {"model": "another"},
        {"tokens_per_s": 1e30, "forward_tokens_per_s": 1e30},
        {"tokens_per_s": math.inf},
        {"quant": "q" * 500},
        {"max_request_bytes": 0},
        {"queue_delay_s": -1e9},
    ]
    stored = [
        target.publish(owner, target.forged(owner, **fields)) for owner, fields in zip(owners, claims, strict=True)
    ]
    assert all(stored)
    assert not target.publish(owners[0], target.forged(owners[0]), FOR_EVER_S)
    short = short_key()
    assert not target.publish(short, target.forged(short))
    with target.client() as remote:
        view = background.run(remote.blocks.swarm.view(0.0))
        believed = {owners[3].peer_id, owners[6].peer_id, target.record.peer_id}
        assert {server.peer_id for server in view.servers} == believed
        assert max(server.tokens_per_s for server in view.servers) < 1e6
        assert torch.equal(remote.generate(PROMPT, **OPTIONS), target.honest.expected)
    target.withdraw(owners)


@attack("a false list of models", besieged)
def test_a_models_list_that_strangers_write(target: Besieged) -> None:
    """An unsigned entry hid the swarm for 115 days."""
    keys = [models_key(DEFAULT_SWARM, shard) for shard in range(NUM_SHARDS)]
    owners = target.owners(20)
    for number, owner in enumerate(owners):
        forged = target.forged(owner, model=f"invented {number}").SerializeToString()
        assert not any(target.stranger.store(keys, owner, forged, FOR_EVER_S))
        assert all(target.stranger.store(keys, owner, forged))
    liar = target.forged(owners[0], num_blocks=99).SerializeToString()
    assert all(target.stranger.store(keys, owners[0], liar))

    async def listed() -> dict[str, int]:
        dht = await Dht.join(DEFAULT_SWARM, [target.server.ready["peer"]], new_identity())
        try:
            return await dht.models()
        finally:
            await dht.shutdown()

    models = background.run(listed())
    assert target.record.model in models  # one voice against one: either number, but it is there
    assert len(models) == 20  # all but the one that the first identity no longer speaks of
    for number, owner in enumerate(owners):
        gone = target.forged(owner, model=f"invented {number}", state=ServerState.OFFLINE.value)
        target.stranger.store(keys, owner, gone.SerializeToString())
    assert background.run(listed()) == {target.record.model: target.record.num_blocks}


@attack("two hundred identities of one address", besieged)
def test_two_hundred_identities_of_one_address(target: Besieged) -> None:
    owners = target.owners(200)
    for owner in owners:
        message = target.forged(owner)
        message.addresses[:] = [NOWHERE]
        target.publish(owner, message)
    with target.client(timeouts=Timeouts(connect_s=0.5)) as remote:
        swarm = remote.blocks.swarm

        async def seen_and_usable() -> tuple[int, int]:
            return len((await swarm.view(0.0)).servers), len(swarm._usable({})[0].servers)

        assert background.run(seen_and_usable()) == (201, MAX_PER_ADDRESS + 1)
        assert torch.equal(remote.generate(PROMPT, **OPTIONS), target.honest.expected)
    target.withdraw(owners)


@contextmanager
def served(service: object) -> Iterator[tuple[str, bytes]]:
    """Its address, and the fingerprint of its certificate."""
    certificate = Certificate.generate()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        serve_methods(service, server)
        port = server.add_secure_port("127.0.0.1:0", certificate.server_credentials())
        await server.start()
        return server, port

    server, port = background.run(start())
    try:
        yield f"127.0.0.1:{port}", certificate.fingerprint
    finally:
        background.run(server.stop(0))


@contextmanager
def stallers(target: Besieged, number: int) -> Iterator[Staller]:
    """So many servers by what the DHT says, which are all this one."""
    owners, staller = target.owners(number), Staller()
    with served(staller) as (address, fingerprint):
        for owner in owners:
            message = target.forged(owner, tls_fingerprint=fingerprint)
            message.addresses[:] = [address]
            assert target.publish(owner, message)
        yield staller
    target.withdraw(owners)


@attack("servers that answer pings and no step", besieged)
def test_forty_servers_that_answer_pings_and_no_step(target: Besieged) -> None:
    events: list[Event] = []
    options = dict(timeouts=Timeouts(stall_s=3.0, trial_s=6.0), on_event=events.append)
    with stallers(target, 40) as staller, target.client(**options) as remote:
        assert torch.equal(remote.generate(PROMPT, **OPTIONS), target.honest.expected)
        recoveries = [event for event in events if isinstance(event, Recovery)]
        assert len(recoveries) == 1 and staller.num_steps > 1
        steps = staller.num_steps
        assert torch.equal(remote.generate(PROMPT, **OPTIONS), target.honest.expected)
        assert staller.num_steps == steps and len(events) == len(recoveries)  # it has learned whom to take


@attack("servers that answer pings and no pass", besieged)
def test_servers_that_answer_pings_and_no_pass_of_training(target: Besieged) -> None:
    retries: list[Event] = []
    options = dict(timeouts=Timeouts(stall_s=1.5), on_event=retries.append, step_timeout_s=1e6)
    with stallers(target, 3) as staller:
        with target.client(**options) as remote, torch.no_grad():
            logits = remote(PROMPT, use_cache=False).logits
        assert torch.allclose(logits, target.honest.logits, atol=1e-4)
        assert staller.num_passes and all("did not finish a pass within" in event.reason for event in retries)
