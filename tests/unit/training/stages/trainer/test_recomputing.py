"""Who says that something is not finite is believed if a peer of the last stage finds the same itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.pb import swarm_pb2 as wire_pb
from swarm_protocol.rpc.channels import translated
from swarm_protocol.wire.codec import encode
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.client import MicroBatch, StagesClient, WireForms
from tests.worlds.identities import identity
from tests.worlds.toy_stages import RUN, START, tokens
from tests.worlds.trainer_swarm import Member, Swarm

LIMIT_S = 240.0
LAST = 2
IDS = tokens(0, 0)


@asynccontextmanager
async def running_swarm() -> AsyncIterator[tuple[Swarm, StagesClient]]:
    """Three stages of two peers each, whose run has a checkpoint to go back to, and somebody who was admitted."""
    async with Swarm.running(2, 2, 2) as swarm:
        for member in swarm.members():
            member.host.has_checkpoint = True
        network = GrpcNetwork(ClientCredentials(identity(95)))
        try:
            yield swarm, StagesClient(network, RUN, WireForms())
        finally:
            await network.close()


def spoil(members: list[Member]) -> None:
    with torch.no_grad():
        for member in members:
            member.host.stage.parameters[0].fill_(torch.nan)


async def told(swarm: Swarm, client: StagesClient, ids: torch.Tensor = IDS) -> bool:
    record = swarm.stages[LAST][0].record
    return await client.note_not_finite(record, MicroBatch(LAST, START, 3), ids, ids, LIMIT_S)


@pytest.mark.parametrize("stage", range(LAST + 1))
async def test_what_no_peer_of_a_stage_can_compute_is_believed(stage: int) -> None:
    async with running_swarm() as (swarm, client):
        spoil(swarm.stages[stage])
        assert await told(swarm, client)
        first, second = (member.host for member in swarm.stages[LAST])
        assert first.not_finite == [0] and second.not_finite == []
        num_computed = sum(member.host.num_computed for member in swarm.members())
        assert await told(swarm, client)  # once is enough
        assert sum(member.host.num_computed for member in swarm.members()) == num_computed
        assert not any(member.host.pending or member.host.sums.done for member in swarm.members())


@pytest.mark.parametrize("spoiled", [None, 0, 1])
async def test_a_sentence_alone_sends_nobody_back(spoiled: int | None) -> None:
    """Also if one peer of a stage computes what is not finite, and the other one does not."""
    async with running_swarm() as (swarm, client):
        if spoiled is not None:
            spoil(swarm.stages[spoiled][:1])
        with pytest.raises(RequestRejected, match="all answers for micro-batch 3 are finite, as found here"):
            await told(swarm, client)
        assert not any(member.host.not_finite for member in swarm.members())
        assert not any(member.host.pending or member.host.sums.done for member in swarm.members())


async def test_only_the_last_stage_is_told() -> None:
    async with running_swarm() as (swarm, client):
        spoil(swarm.members())
        with pytest.raises(RequestRejected, match="expected the last stage"):
            await client.note_not_finite(swarm.stages[1][0].record, MicroBatch(1, START, 3), IDS, IDS, LIMIT_S)
        assert not any(member.host.not_finite for member in swarm.members())


def damaged(**changes: object) -> wire_pb.Tensor:
    wire, _ = encode(IDS)
    for name, value in changes.items():
        setattr(wire, name, value)
    return wire


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (wire_pb.Tensor(), "token ids have shape"),
        (encode(torch.zeros(2, 6))[0], "expected .rows, positions. of int64"),
        (encode(torch.zeros(2, 6, 1, dtype=torch.int64))[0], "expected .rows, positions. of int64"),
        (encode(torch.zeros(1, 1 << 21, dtype=torch.int64))[0], "1 × 2097152 positions: expected at most"),
        (damaged(data=b""), "token ids have 0 of 96 bytes"),
        (damaged(data=bytes(97)), "more than the announced 96 bytes"),
    ],
)
async def test_damaged_token_ids_are_refused_before_anything_is_computed(wire: wire_pb.Tensor, message: str) -> None:
    async with running_swarm() as (swarm, client):
        stub = await client._stub(swarm.stages[LAST][0].record)
        which = client.named(MicroBatch(LAST, START, 3))
        for ids, labels in ((wire, damaged()), (damaged(), wire)):
            with pytest.raises(RequestRejected, match=message):
                async with translated():
                    await stub.Commit(pb.CommitRequest(micro_batch=which, is_not_finite=True, ids=ids, labels=labels))
        assert sum(member.host.num_computed for member in swarm.members()) == 0
        assert swarm.stages[LAST][0].service.room.bytes.used == 0
