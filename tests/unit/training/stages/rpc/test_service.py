"""Micro-batches over gRPC on loopback: the same numbers as without, limits, wrong steps, damage, exactly once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.errors import (
    AccessDenied,
    BadReply,
    NotFinite,
    PeerBusy,
    PeerMoved,
    PeerUnavailable,
    RequestRejected,
)
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.pb import swarm_pb2 as wire_pb
from swarm_protocol.rpc.channels import translated
from swarm_protocol.wire.codec import encode
from swarm_protocol.wire.constants import MAX_MESSAGE_BYTES, PART_BYTES
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.answers import StageAnswer
from swarm_training.stages.rpc.client import MicroBatch, StageRequest, StagesClient, WireForms
from swarm_training.stages.rpc.forms import FORMS, encode_as
from swarm_training.stages.rpc.framing import pack
from swarm_training.stages.rpc.room import StageLimits
from swarm_training.stages.rpc.service import StagesService
from tests.unit.support import until
from tests.worlds.identities import identity
from tests.worlds.toy_stages import RUN, START, ToyHost, ToyStage, serving, tokens

TRAINER = 9
TIMEOUT_S = 30.0


@asynccontextmanager
async def peer_of(
    host: ToyHost, form: str = "fp32", **how: Any
) -> AsyncIterator[tuple[StagesClient, Progress, ToyHost]]:
    async with serving(host, **how) as (peer, service):
        network = GrpcNetwork(ClientCredentials(identity(TRAINER)))
        try:
            yield StagesClient(network, RUN, WireForms(form, form)), peer, host
        finally:
            await network.close()
        assert service.room.requests.used == service.room.bytes.used == 0


def batch(stage: int, number: int = 0, moment: Moment = START) -> MicroBatch:
    return MicroBatch(stage, moment, number)


async def backward(client: StagesClient, peer: Progress, number: int = 0, timeout_s: float = TIMEOUT_S) -> None:
    """Of the first of two stages."""
    ids = tokens(0, number)
    grad = torch.ones(*ids.shape, 8)
    asked = StageRequest(batch(0, number), ids, grad=grad, accumulates=True, is_backward=True)
    await client.ask(asked, peer, timeout_s)


def forward(client: StagesClient, peer: Progress, which: MicroBatch, inputs: Tensor) -> Awaitable[StageAnswer]:
    return client.ask(StageRequest(which, inputs), peer, TIMEOUT_S)


@pytest.mark.parametrize(("form", "most"), [("fp32", 0.0), ("fp64", 0.0), ("bf16", 0.01), ("int8", 0.03)])
async def test_answers_are_those_of_the_stage_itself(form: str, most: float) -> None:
    assert set(FORMS) == {"fp32", "fp64", "bf16", "int8"}
    hidden, ids = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)), tokens(0, 0)

    def close(found: Tensor | None, expected: Tensor | None) -> bool:
        assert found is not None and expected is not None
        return float((found.float() - expected).norm()) <= most * float(expected.norm())

    async with peer_of(ToyHost(ToyStage(0, 3)), form) as (client, peer, host):
        assert close((await forward(client, peer, batch(0), ids)).tensor, host.stage.forward(ids).hidden)
    async with peer_of(ToyHost(ToyStage(1, 3)), form) as (client, peer, host):
        asked = StageRequest(batch(1), hidden, grad=hidden, wants_grad=True, is_backward=True)
        found = await client.ask(asked, peer, TIMEOUT_S)
        assert close(found.tensor, host.stage.backward(hidden, grad=hidden).inputs) and not host.pending
    async with peer_of(ToyHost(ToyStage(2, 3)), form) as (client, peer, host):
        how = {"loss_scale": 7.0, "accumulates": True, "wants_grad": True, "is_backward": True}
        found = await client.ask(StageRequest(batch(2, 3), hidden, ids, **how), peer, TIMEOUT_S)
        expected = host.stage.backward(hidden, ids, loss_scale=7.0)
        assert close(found.tensor, expected.inputs) and found.num_tokens == expected.num_tokens == 10
        assert found.loss_sum == pytest.approx(expected.loss_sum, rel=max(most, 1e-12))
        (pending,) = host.pending.items()
        assert pending[0] == (3, identity(TRAINER).peer_id)
        assert all(close(a, b) for a, b in zip(pending[1], expected.parameters, strict=True))


async def test_large_tensors_travel_in_parts() -> None:
    stage = ToyStage(1, 3, hidden_size=256)
    hidden = torch.randn(4, 512, 256, generator=torch.Generator().manual_seed(0))  # 4 MiB in fp64
    async with peer_of(ToyHost(stage), "fp64") as (client, peer, _host):
        asked = StageRequest(batch(1), hidden, grad=hidden, wants_grad=True, is_backward=True)
        found = await client.ask(asked, peer, TIMEOUT_S)
        assert torch.equal(found.tensor.float(), stage.backward(hidden, grad=hidden).inputs)
    form = FORMS["fp64"]
    messages = list(pack(pb.ComputeRequest(), [(name, encode_as(form, hidden)) for name in ("inputs", "grad")]))
    assert len(messages) == 8 and all(each.ByteSize() < MAX_MESSAGE_BYTES - PART_BYTES // 4 for each in messages)


async def test_a_commit_counts_once_however_often_it_comes() -> None:
    async with peer_of(ToyHost(ToyStage(0, 2))) as (client, peer, host):
        assert not await client.commit(peer, batch(0, 5), TIMEOUT_S)
        for _ in range(2):  # an answer was lost, the trainer asks again
            await backward(client, peer, 5)
        assert not host.sums.done and len(host.pending) == 1
        for _ in range(3):
            assert await client.commit(peer, batch(0, 5), TIMEOUT_S)
        await backward(client, peer, 5)
        assert await client.commit(peer, batch(0, 5), TIMEOUT_S)
        assert host.sums.done == {5} and not host.pending
        ids = tokens(0, 5)
        expected = host.stage.backward(ids, grad=torch.ones(*ids.shape, 8)).parameters
        assert torch.allclose(host.sums.total.float(), torch.cat([each.reshape(-1) for each in expected]))


async def test_another_step_stage_run_or_version_is_refused_with_what_the_peer_is_at() -> None:
    async with peer_of(ToyHost(ToyStage(0, 2), moment=Moment(2, 7))) as (client, peer, host):
        ids, at = tokens(0, 0), Moment(2, 7)
        calls = [
            lambda which: forward(client, peer, which, ids),
            lambda which: client.commit(peer, which, TIMEOUT_S),
        ]
        for call in calls:
            for moment in (Moment(2, 6), Moment(2, 8), Moment(1, 7)):
                with pytest.raises(PeerMoved, match="this peer is at step 7 after 2"):
                    await call(batch(0, 0, moment))
            with pytest.raises(PeerMoved, match="has stage 0 of run toys, not stage 1"):
                await call(batch(1, 0, at))
            with pytest.raises(RequestRejected, match="no micro-batch 8: expected 0 to 7"):
                await call(batch(0, 8, at))
        with pytest.raises(PeerMoved, match="not stage 0 of run other"):
            await StagesClient(client._network, "other", WireForms()).commit(peer, batch(0, 0, at), TIMEOUT_S)
        assert host.num_computed == 0


async def test_a_step_that_was_taken_while_the_request_waited_is_refused() -> None:
    host = ToyHost(ToyStage(0, 2), gate=asyncio.Event())
    async with serving(host) as (peer, service):
        network = GrpcNetwork(ClientCredentials(identity(TRAINER)))
        asking = asyncio.ensure_future(backward(StagesClient(network, RUN, WireForms()), peer))
        await until(lambda: service.room.requests.used and service.room.bytes.used)
        host.clear(Moment(0, 1))
        assert host.gate is not None
        host.gate.set()
        with pytest.raises(PeerMoved, match="at step 1"):
            await asking
        assert not host.pending
        await network.close()


async def test_who_has_no_room_says_so_at_once() -> None:
    host = ToyHost(ToyStage(0, 2), gate=asyncio.Event())
    async with serving(host, limits=StageLimits(max_requests=4)) as (peer, service):
        networks = [GrpcNetwork(ClientCredentials(identity(number))) for number in (TRAINER, TRAINER + 1)]
        clients = [StagesClient(network, RUN, WireForms()) for network in networks]
        waiting = []
        for client in clients:
            waiting += [asyncio.ensure_future(backward(client, peer, number)) for number in range(2)]
            while service.room.requests.used < len(waiting):
                await asyncio.sleep(0.01)
            with pytest.raises(PeerBusy, match="it takes 4, half of them from one") as error:
                await backward(client, peer, 3)
            assert error.value.peer_id == peer.peer_id
        assert host.gate is not None
        host.gate.set()
        await asyncio.gather(*waiting)
        for network in networks:
            await network.close()


async def test_bytes_and_pending_gradients_are_limited() -> None:
    host = ToyHost(ToyStage(0, 2))
    async with peer_of(host, limits=StageLimits(max_bytes=2 * 400)) as (client, peer, _host):
        with pytest.raises(PeerBusy, match="no room for 384 bytes more"):
            await backward(client, peer)
        assert host.num_computed == 0
        await forward(client, peer, batch(0), tokens(0, 0))
    async with peer_of(ToyHost(ToyStage(0, 2), max_pending=1)) as (client, peer, _host):
        await backward(client, peer, 0)
        with pytest.raises(PeerBusy, match="wait here for their commit"):
            await backward(client, peer, 1)
        assert await client.commit(peer, batch(0, 0), TIMEOUT_S)
        await backward(client, peer, 1)


async def test_who_is_refused_while_it_sends_hears_why() -> None:
    """More than fits into what gRPC sends ahead: for a write under way when a call ends, it has an error of its own."""
    limits = StageLimits(max_bytes=400, max_tokens=1 << 30)
    async with peer_of(ToyHost(ToyStage(1, 2)), limits=limits) as (client, peer, host):
        for _ in range(3):
            with pytest.raises(PeerBusy, match="no room for"):
                await forward(client, peer, batch(1), torch.zeros(1, 1 << 19, 8))
        assert host.num_computed == 0


async def test_what_a_trainer_left_behind_is_dropped() -> None:
    async with peer_of(ToyHost(ToyStage(0, 2)), limits=StageLimits(silence_s=0.3)) as (client, peer, host):
        threads, forget = list[int](), host.sums.forget
        host.sums.forget = lambda trainer: (threads.append(threading.get_ident()), forget(trainer))
        await backward(client, peer, 0)
        await until(lambda: not host.pending)
        assert threads[0] != threading.get_ident()  # one that adds to the sums may hold their lock for long
        assert not await client.commit(peer, batch(0, 0), TIMEOUT_S)


async def test_silence_is_not_waited_for_and_a_late_gradient_does_not_count() -> None:
    host = ToyHost(ToyStage(0, 2), gate=asyncio.Event())
    async with peer_of(host) as (client, peer, _host):
        with pytest.raises(PeerUnavailable, match=r"no answer within 0\.2 s"):
            await backward(client, peer, timeout_s=0.2)
        assert host.gate is not None
        host.gate.set()
        await backward(client, peer, 1)
        assert not host.sums.done


def wire(tensor: Tensor, **changes: Any) -> wire_pb.Tensor:
    found, _ = encode(tensor)
    for name, value in changes.items():
        if name == "shape":
            found.ClearField("shape")
            found.shape.extend(value)
        else:
            setattr(found, name, value)
    return found


IDS, HIDDEN, GRAD = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6, 8), torch.ones(2, 6, 8)
DAMAGED: dict[str, tuple[int, dict[str, Any], str]] = {
    "no inputs": (1, {"grad": wire(GRAD)}, "grad have shape"),
    "no grad": (1, {"inputs": wire(HIDDEN)}, "grad are missing"),
    "no labels": (2, {"inputs": wire(HIDDEN)}, "labels are missing"),
    "labels elsewhere": (1, {"inputs": wire(HIDDEN), "labels": wire(IDS)}, "expects none"),
    "grad at the end": (2, {"inputs": wire(HIDDEN), "grad": wire(GRAD)}, "expects none"),
    "hidden size": (1, {"inputs": wire(torch.ones(2, 6, 9))}, r"expected \[2, 6, 8\]"),
    "rank": (1, {"inputs": wire(torch.ones(6, 8))}, r"expected \[rows, positions, 8\]"),
    "negative": (0, {"inputs": wire(IDS, shape=[-2, -6])}, r"expected \[rows, positions\]"),
    "nothing": (0, {"inputs": wire(IDS[:0])}, r"expected \[rows, positions\]"),
    "no ids": (0, {"inputs": wire(IDS.float())}, "expected token ids in int64"),
    "other dtype": (1, {"inputs": wire(HIDDEN.bfloat16())}, "wire form 0 expects"),
    "other grad": (1, {"inputs": wire(HIDDEN), "grad": wire(GRAD[:1])}, r"grad have shape \[1, 6, 8\]"),
    "too many": (0, {"inputs": wire(IDS, shape=[4096, 1 << 40])}, "expected at most 4096 rows"),
    "too few bytes": (1, {"inputs": wire(HIDDEN, data=b"12")}, "only 2 of 384 bytes"),
    "more bytes": (1, {"inputs": wire(HIDDEN, data=bytes(385))}, "more than the announced 384 bytes"),
    "other size": (1, {"inputs": wire(HIDDEN, size_bytes=400)}, "takes 384 bytes, not 400"),
    "NaN": (1, {"inputs": wire(HIDDEN), "grad": wire(GRAD * torch.nan)}, "grad are not finite"),
    "infinity": (1, {"inputs": wire(HIDDEN * torch.inf), "grad": wire(GRAD)}, "inputs are not finite"),
    "a part of nothing": (1, {"part": b"123"}, "without its beginning"),
    "form": (1, {"work": pb.Work(inputs_form=9)}, "wire form 9 is unknown"),
    "loss scale": (2, {"work": pb.Work(loss_scale=0.0)}, "loss_scale is 0.0"),
    "infinite loss scale": (2, {"work": pb.Work(loss_scale=torch.inf)}, "loss_scale is inf"),
}


@pytest.mark.parametrize("name", DAMAGED)
async def test_damaged_requests_are_refused_before_anything_is_computed(name: str) -> None:
    index, content, message = DAMAGED[name]
    work = pb.Work(micro_batch=pb.MicroBatch(wire_version=1, run=RUN, stage=index), loss_scale=1.0, accumulates=True)
    work.MergeFrom(content.get("work", pb.Work()))
    if name == "loss scale":
        work.loss_scale = 0.0
    first = pb.ComputeRequest(work=work, **{key: value for key, value in content.items() if key != "work"})
    async with peer_of(ToyHost(ToyStage(index, 3))) as (client, peer, host):
        stub = await client._stub(peer)
        with pytest.raises(RequestRejected, match=message):
            async with translated():
                async for _ in stub.Backward(iter([first])):
                    pass
        assert host.num_computed == 0 and not host.pending


async def test_calls_that_do_not_begin_are_refused() -> None:
    async with peer_of(ToyHost(ToyStage(0, 3))) as (client, peer, _host):
        stub = await client._stub(peer)
        work = pb.Work(micro_batch=pb.MicroBatch(wire_version=1, run=RUN))
        rows = [
            ([], "without a message"),
            ([pb.ComputeRequest(inputs=wire(IDS))], "must have `work` in its first message"),
            ([pb.ComputeRequest(work=work), pb.ComputeRequest(work=work)], "and in no later one"),
            ([pb.ComputeRequest(work=work, inputs=wire(IDS)), pb.ComputeRequest(inputs=wire(IDS))], "two tensors"),
        ]
        for messages, expected in rows:
            with pytest.raises(RequestRejected, match=expected):
                async with translated():
                    async for _ in stub.Forward(iter(messages)):
                        pass
        old = pb.MicroBatch(wire_version=0, run=RUN)
        with pytest.raises(PeerMoved, match="speaks version 1 of stages, the trainer 0"):
            async with translated():
                await stub.Commit(pb.CommitRequest(micro_batch=old))


class Liar(StagesService):
    """Answers with ``reply``."""

    reply: pb.ComputeReply | None

    async def Forward(self, requests: Any, context: Any) -> None:
        async for _ in requests:
            pass
        if self.reply is not None:
            await context.write(self.reply)


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (None, BadReply, "the answer is empty"),
        (pb.ComputeReply(loss_sum=1.0), BadReply, "output is missing"),
        (pb.ComputeReply(tensor=wire(HIDDEN[:1])), BadReply, r"has shape \[1, 6, 8\]"),
        (pb.ComputeReply(tensor=wire(HIDDEN, data=b"12")), BadReply, "only 2 of 384"),
        (pb.ComputeReply(tensor=wire(HIDDEN.half())), BadReply, "wire form 0 expects"),
        (pb.ComputeReply(tensor=wire(HIDDEN * torch.nan)), NotFinite, "not finite"),
    ],
)
async def test_wrong_answers_are_the_peers_fault(reply: pb.ComputeReply | None, kind: type, message: str) -> None:
    async with peer_of(ToyHost(ToyStage(0, 2)), make=Liar) as (client, peer, _host):
        Liar.reply = reply
        with pytest.raises(kind, match=message) as error:
            await forward(client, peer, batch(0), IDS)
        assert error.value.peer_id == peer.peer_id


async def test_only_trainers_are_let_into_a_private_run_and_peers_are_known_by_their_certificate() -> None:
    organiser, now = OrganiserKey.generate(), time.time()
    grant = Grant.new(organiser.public, Role.TRAINER, "ada", identity(TRAINER).peer_id, now - 10, now + 1000)
    async with serving(ToyHost(ToyStage(0, 2)), access=AccessControl(organiser.public)) as (peer, _):
        for token in (grant.signed(organiser), b""):
            network = GrpcNetwork(ClientCredentials(identity(TRAINER), token))
            client = StagesClient(network, RUN, WireForms())
            if token:
                await forward(client, peer, batch(0), IDS)
                with pytest.raises(PeerUnavailable, match="another TLS certificate"):
                    await forward(client, replace(peer, tls_fingerprint=bytes(32)), batch(0), IDS)
            else:
                with pytest.raises(AccessDenied, match="takes only members"):
                    await forward(client, peer, batch(0), IDS)
            await network.close()
