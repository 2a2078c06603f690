"""A trainer's calls for audits: to the peer that has answered, and to the mates that judge its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm_protocol.errors import BadReply
from swarm_protocol.rpc.channels import translated
from swarm_protocol.wire.status import FirstStatus
from swarm_training.core.record import Progress
from swarm_training.net.channels import GrpcNetwork
from swarm_training.pb import training_ledger_pb2 as ledger_pb
from swarm_training.stages.audit.statements import (
    AnswerStatement,
    answer_digest,
    arrived,
    evidence_form,
    request_digest,
)
from swarm_training.stages.pb import stages_audit_pb2 as audit_pb
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.answers import StageAnswer, replies_of
from swarm_training.stages.rpc.client import StageRequest, StagesClient, answering
from swarm_training.stages.rpc.forms import encode_as
from swarm_training.stages.rpc.framing import pack
from swarm_training.stages.rpc.validation import form_of

_AUDITS = audit_pb.DESCRIPTOR.services_by_name["Audits"]


@dataclass(frozen=True)
class AuditEvidence:
    """The statement that a peer has signed about its answer, with the signed message."""

    statement: AnswerStatement
    signed: ledger_pb.SignedByPeer


class AuditClient:
    """A trainer's client for audits. Calls raise PeerError, RequestRejected or AccessDenied, as in ``StagesClient``."""

    def __init__(self, network: GrpcNetwork, client: StagesClient) -> None:
        self._network, self._client = network, client

    async def attest(
        self,
        peer: Progress,
        asked: StageRequest,
        answer: StageAnswer,
        seed: bytes,
        timeout_s: float,
        *,
        withdraws: bool,
    ) -> AuditEvidence:
        """Return the peer's signed statement about ``answer``, which the same peer has given.

        Raises BadReply if the statement is about another request or answer, since it is no evidence then."""
        request = audit_pb.AttestRequest(
            micro_batch=self._client.named(asked.which),
            is_backward=asked.is_backward,
            seed=seed,
            withdraws=withdraws,
        )
        stub = await self._network.stub(_AUDITS, peer)
        async with answering(peer, timeout_s):
            reply: audit_pb.AttestReply = await stub.Attest(request)
        try:
            statement = AnswerStatement.read(reply.statement)
        except ValueError as error:
            raise BadReply(str(error), peer.peer_id) from None
        work = self._client.work(asked)
        tensors = {name: arrived(form_of(work, name), tensor) for name, tensor in asked.tensors().items()}
        expected = AnswerStatement(
            peer.peer_id,
            work,
            asked.is_backward,
            request_digest(tensors),
            answer_digest(answer),
            seed,
            statement.sketch,
        )
        has_sketch = asked.is_backward and asked.accumulates
        if statement != expected or bool(statement.sketch) != has_sketch:
            raise BadReply("a peer signs something else than what it has answered", peer.peer_id)
        return AuditEvidence(statement, reply.statement)

    async def accuse(
        self, mate: Progress, asked: StageRequest, answer: StageAnswer, evidence: AuditEvidence, timeout_s: float
    ) -> bool:
        """Return whether the mate upholds the accusation, and excludes the peer that gave this answer."""
        stub = await self._network.stub(_AUDITS, mate)
        async with answering(mate, timeout_s):
            call = stub.Accuse(self._accusation(asked, answer, evidence))
            async with translated(mate.peer_id, FirstStatus(call)):
                reply: audit_pb.AccuseReply = await call
            return reply.is_upheld

    def _accusation(
        self, asked: StageRequest, answer: StageAnswer, evidence: AuditEvidence
    ) -> Iterator[audit_pb.AccuseRequest]:
        work = self._client.work(asked)
        yield audit_pb.AccuseRequest(statement=evidence.signed)
        named = [(name, encode_as(form_of(work, name), tensor)) for name, tensor in asked.tensors().items()]
        for request in pack(pb.ComputeRequest(), named):
            yield audit_pb.AccuseRequest(request=request)
        for reply in replies_of(answer, evidence_form(work.reply_form)):
            yield audit_pb.AccuseRequest(answer=reply)
