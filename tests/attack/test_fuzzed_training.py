"""Changed messages of audits and changed calls of experts are refused or answered rightly, and convict nobody."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.pb import swarm_pb2
from swarm_protocol.wire.codec import encode
from swarm_protocol.wire.constants import CLIENT_OPTIONS
from swarm_training.experts.pb import experts_pb2 as experts_pb
from swarm_training.stages.pb import stages_audit_pb2 as audit_pb
from tests.attack.fuzzing.conversations import Call
from tests.attack.fuzzing.training_calls import answers
from tests.unit.training.experts.server.test_host import CELL, ROWS, running_host
from tests.unit.training.stages.audit.test_service import SEED, TRAINER, asked_of, court_of
from tests.worlds.identities import identity
from tests.worlds.toy_stages import ToyStage

LASTING = pytest.mark.run_by(function=asyncio.run)
COUNTS = [200, pytest.param(5000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]


@LASTING
@pytest.mark.parametrize("count", COUNTS)
async def test_audits(count: int) -> None:
    """The answer that is signed and accused is right: whoever excludes its peer has been deceived."""
    async with court_of(ToyStage(1, 3)) as court:
        asked = asked_of(1)
        answer = await court.answer(asked)
        evidence = await court.attest(asked, answer)
        attesting = audit_pb.AttestRequest(micro_batch=court.stages.named(asked.which), is_backward=True, seed=SEED)
        honest = [
            Call("Attest", (attesting,)),
            Call("Accuse", tuple(court.audits._accusation(asked, answer, evidence))),
        ]
        for record, peer in (court.accused, court.mate):
            channel = await pinned_channel(
                ClientCredentials(identity(TRAINER)), record.address, record.tls_fingerprint, CLIENT_OPTIONS
            )
            found = await answers(channel, "swarm.stages.v1.Audits", honest, 41, count)
            await channel.close()
            refused = {method: each.total() - each["OK"] for method, each in found.items()}
            assert all(number > 10 for number in refused.values()), found
            assert not peer.excluded
        assert found["Accuse"]["OK"] > 5
        fresh = asked_of(1)
        again = await court.answer(fresh)
        assert not await court.accuse(fresh, again, await court.attest(fresh, again))


@LASTING
@pytest.mark.parametrize("count", COUNTS)
async def test_experts(count: int) -> None:
    async with running_host() as (calls, holder, host):
        rows: swarm_pb2.Tensor = encode(ROWS)[0]
        name: dict[str, object] = {"name": "demo", "cell": CELL}
        replica = experts_pb.Replica(cell=CELL, num_steps=1, size_bytes=4, sha256=b"s" * 32)
        honest = [
            Call("Forward", (experts_pb.ForwardRequest(**name, inputs=rows),)),
            Call("Backward", (experts_pb.BackwardRequest(**name, inputs=rows, grad_outputs=rows),)),
            Call("KeepReplica", (experts_pb.KeepReplicaRequest(name="demo", replica=replica, data=b"data"),)),
            Call("ListReplicas", (experts_pb.ListReplicasRequest(name="demo"),)),
            Call("FetchReplica", (experts_pb.FetchReplicaRequest(**name),)),
        ]
        channel = await pinned_channel(
            ClientCredentials(identity(1)), holder.address, holder.tls_fingerprint, CLIENT_OPTIONS
        )
        found = await answers(channel, "swarm.experts.v1.Experts", honest, 41, count)
        await channel.close()
        for method in ("Forward", "Backward"):
            assert found[method]["OK"] > 3 and found[method].total() - found[method]["OK"] > 3, found
        output = await calls.forward(holder, "demo", CELL, ROWS)
        assert torch.equal(output, host.experts[CELL].module(ROWS)) and list(host.experts) == [CELL]
