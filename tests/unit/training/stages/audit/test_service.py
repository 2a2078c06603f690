"""Statements and accusations over gRPC: who has lied is excluded, and slander and damage come to nothing."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_protocol.errors import BadReply, PeerMoved, RequestRejected
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_protocol.rpc.channels import translated
from swarm_protocol.rpc.serving import start_server
from swarm_protocol.wire.status import FirstStatus
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.audit.answers import AnswerLog
from swarm_training.stages.audit.client import _AUDITS, AuditClient, AuditEvidence
from swarm_training.stages.audit.service import AuditService
from swarm_training.stages.audit.sketch import SEED_BYTES, sketch
from swarm_training.stages.audit.statements import AnswerStatement
from swarm_training.stages.pb import stages_audit_pb2 as audit_pb
from swarm_training.stages.rpc.answers import StageAnswer
from swarm_training.stages.rpc.client import MicroBatch, StageRequest, StagesClient, WireForms
from swarm_training.stages.rpc.forms import FORMS
from swarm_training.stages.rpc.service import StagesService
from tests.worlds.identities import identity
from tests.worlds.toy_stages import RUN, START, ToyGradients, ToyHost, ToyStage, tokens

ACCUSED, MATE, TRAINER = 1, 2, 9
SEED, TIMEOUT_S = bytes(range(SEED_BYTES)), 30.0


class Liar(ToyStage):
    """Its gradients of weights are wrong, and all else is right."""

    def backward(self, *arguments: Any, **named: Any) -> ToyGradients:
        found = super().backward(*arguments, **named)
        return replace(found, parameters=[1.1 * each for each in found.parameters])


@dataclass
class Peer:
    """For an ``AuditService``: what is pending, and whom it excludes."""

    host: ToyHost
    excluded: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.host.sums.pending, self.host.sums.withdraw = self.pending, self.withdraw
        self.host.peer.banned, self.host.peer.exclude = self.banned, self.exclude

    def pending(self, m: int, trainer: str) -> list[Tensor] | None:
        return self.host.pending.get((m, trainer))

    def withdraw(self, m: int, trainer: str) -> None:
        self.host.pending.pop((m, trainer), None)

    def banned(self) -> frozenset[str]:
        return frozenset(self.excluded)

    def exclude(self, peer_id: str) -> None:
        self.excluded.add(peer_id)


@asynccontextmanager
async def serving(number: int, stage: ToyStage) -> AsyncIterator[tuple[Progress, Peer]]:
    peer, own, answers, certificate = Peer(ToyHost(stage)), identity(number), AnswerLog(), Certificate.generate()
    service = StagesService(RUN, peer.host, note_answer=answers.note)
    audits = AuditService(RUN, peer.host, own, answers)
    server, port = await start_server(
        lambda server: (service.add_to(server), audits.add_to(server)), certificate, "127.0.0.1", 0
    )
    try:
        address = f"127.0.0.1:{port}"
        yield Progress(RUN, own.peer_id, address=address, tls_fingerprint=certificate.fingerprint), peer
    finally:
        service.close()
        await server.stop(None)


@dataclass
class Court:
    """A trainer, a peer that has answered it, and a mate of that peer."""

    stages: StagesClient
    audits: AuditClient
    accused: tuple[Progress, Peer]
    mate: tuple[Progress, Peer]

    async def answer(self, asked: StageRequest) -> StageAnswer:
        return await self.stages.ask(asked, self.accused[0], TIMEOUT_S)

    async def attest(
        self, asked: StageRequest, answer: StageAnswer, seed: bytes = SEED, withdraws: bool = False
    ) -> AuditEvidence:
        return await self.audits.attest(self.accused[0], asked, answer, seed, TIMEOUT_S, withdraws=withdraws)

    async def accuse(self, asked: StageRequest, answer: StageAnswer, evidence: AuditEvidence) -> bool:
        return await self.audits.accuse(self.mate[0], asked, answer, evidence, TIMEOUT_S)


@asynccontextmanager
async def court_of(accused: ToyStage, form: str = "fp32") -> AsyncIterator[Court]:
    network = GrpcNetwork(ClientCredentials(identity(TRAINER)))
    stages, mate = StagesClient(network, RUN, WireForms(form, form)), ToyStage(accused.index, accused.num_stages)
    try:
        async with serving(ACCUSED, accused) as first, serving(MATE, mate) as second:
            yield Court(stages, AuditClient(network, stages), first, second)
    finally:
        await network.close()


def asked_of(stage: int, moment: Moment = START) -> StageRequest:
    """A backward pass of one of three stages."""
    ids, which = tokens(0, 3), MicroBatch(stage, moment, 3)
    hidden = torch.randn(*ids.shape, 8, generator=torch.Generator().manual_seed(0))
    return StageRequest(
        which,
        hidden if stage else ids,
        labels=ids if stage == 2 else None,
        grad=None if stage == 2 else hidden,
        loss_scale=7.0 if stage == 2 else 1.0,
        accumulates=True,
        wants_grad=stage > 0,
        is_backward=True,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("is_lie", [True, False])
async def test_a_lie_is_found_in_what_was_signed_and_the_truth_is_no_lie(is_lie: bool, stage: int, form: str) -> None:
    async with court_of((Liar if is_lie else ToyStage)(stage, 3), form) as court:
        asked = asked_of(stage)
        answer = await court.answer(asked)
        evidence = await court.attest(asked, answer)
        gradients = court.accused[1].host.pending[3, identity(TRAINER).peer_id]
        assert evidence.statement.sketch == pytest.approx(sketch(gradients, SEED), rel=1e-6)
        assert await court.accuse(asked, answer, evidence) == is_lie
        assert court.mate[1].excluded == ({court.accused[0].peer_id} if is_lie else set())
        assert await court.accuse(asked, answer, evidence) == is_lie


async def test_a_forward_pass_is_signed_too() -> None:
    class Noisy(ToyStage):
        def forward(self, inputs: Tensor, labels: Tensor | None = None, keeps: bool = True) -> Any:
            found = super().forward(inputs, labels, keeps)
            return replace(found, hidden=found.hidden + 0.5)

    async with court_of(Noisy(0, 3)) as court:
        asked = StageRequest(MicroBatch(0, START, 3), tokens(0, 3))
        answer = await court.answer(asked)
        assert await court.accuse(asked, answer, await court.attest(asked, answer))


async def test_evidence_that_was_changed_convicts_nobody() -> None:
    async with court_of(ToyStage(1, 3)) as court:
        asked = asked_of(1)
        answer = await court.answer(asked)
        evidence = await court.attest(asked, answer)
        assert answer.tensor is not None
        other = replace(answer, tensor=-answer.tensor)
        for changed in (replace(asked, inputs=2 * asked.inputs), replace(asked, grad=-asked.inputs)):
            with pytest.raises(RequestRejected, match="about another request or answer"):
                await court.accuse(changed, answer, evidence)
        with pytest.raises(RequestRejected, match="about another request or answer"):
            await court.accuse(asked, other, evidence)
        for change in ({"sketch": sketch([torch.ones(9)], SEED)}, {"seed": bytes(SEED_BYTES)}, {"is_backward": False}):
            forged = replace(evidence.statement, **change).signed(identity(TRAINER))
            forged.public_key = evidence.signed.public_key
            with pytest.raises(RequestRejected, match=r"signature of .* is wrong"):
                await court.accuse(asked, answer, AuditEvidence(evidence.statement, forged))
        own = evidence.statement.signed(identity(MATE))
        with pytest.raises(RequestRejected, match="accused before itself"):
            await court.accuse(asked, answer, AuditEvidence(evidence.statement, own))
        with pytest.raises(BadReply, match="signs something else"):
            await court.attest(asked, other)
        assert not court.mate[1].excluded


async def test_an_audit_waits_for_the_sums_in_another_thread() -> None:
    """A thread that adds a large gradient to them holds their lock for long."""
    threads: list[int] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (threads.append(threading.get_ident()), call(*arguments))[1]

    async with court_of(ToyStage(1, 3)) as court:
        sums = court.accused[1].host.sums
        sums.pending, sums.withdraw = noted(sums.pending), noted(sums.withdraw)
        asked = asked_of(1)
        await court.attest(asked, await court.answer(asked), withdraws=True)
        assert len(threads) == 2 and threading.get_ident() not in threads


async def test_an_accusation_of_no_answer_is_refused() -> None:
    async with court_of(Liar(1, 3)) as court:
        asked = asked_of(1)
        evidence = await court.attest(asked, await court.answer(asked))
        stub = await court.audits._network.stub(_AUDITS, court.mate[0])
        call = stub.Accuse(iter([audit_pb.AccuseRequest(statement=evidence.signed)]))
        with pytest.raises(RequestRejected, match="inputs are missing"):
            async with translated(court.mate[0].peer_id, FirstStatus(call)):
                await call
        assert not court.mate[1].excluded


async def test_who_has_moved_on_judges_nobody() -> None:
    async with court_of(Liar(1, 3)) as court:
        asked = asked_of(1)
        answer = await court.answer(asked)
        evidence = await court.attest(asked, answer)
        court.mate[1].host.moment = Moment(0, 1)
        with pytest.raises(PeerMoved):
            await court.accuse(asked, answer, evidence)
        assert not court.mate[1].excluded


async def test_a_peer_signs_only_what_it_has_answered() -> None:
    async with court_of(ToyStage(1, 3)) as court:
        asked = asked_of(1)
        with pytest.raises(PeerMoved, match="nothing is known"):
            await court.attest(asked, StageAnswer())
        answer = await court.answer(asked)
        with pytest.raises(RequestRejected, match="a seed has 3 bytes"):
            await court.attest(asked, answer, seed=b"abc")
        await court.attest(asked, answer, withdraws=True)
        assert not court.accused[1].host.pending
        with pytest.raises(PeerMoved, match="is pending"):
            await court.attest(asked, answer)


def test_a_statement_of_other_lengths_is_none() -> None:
    statement = AnswerStatement("", StagesClient(None, RUN, WireForms()).work(asked_of(1)), True, b"", b"", SEED, ())  # type: ignore[arg-type]
    for change, message in (({"sketch": (1.0,)}, "a sketch of 1"), ({"seed": b""}, "a seed of 0 bytes")):
        with pytest.raises(ValueError, match=message):
            AnswerStatement.read(replace(statement, **change).signed(identity(1)))
    infinite = (float("inf"), *[0.0] * 255)
    with pytest.raises(ValueError, match="expected 256 finite"):
        AnswerStatement.read(replace(statement, sketch=infinite).signed(identity(1)))
