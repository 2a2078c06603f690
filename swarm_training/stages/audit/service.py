"""The gRPC service for audits: a stage peer signs its own answers, and checks the signed answers of its mates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from torch import Tensor

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.errors import PeerMoved, RequestRejected
from swarm_protocol.net.identity import Identity
from swarm_protocol.rpc.serving import add_service, admitted
from swarm_training.stages.audit.answers import AnswerLog
from swarm_training.stages.audit.sketch import SEED_BYTES, sketch
from swarm_training.stages.audit.statements import AnswerStatement, answer_digest, evidence_form, request_digest
from swarm_training.stages.audit.testimony import Testimony, Tolerance, agree
from swarm_training.stages.pb import stages_audit_pb2 as audit_pb
from swarm_training.stages.routing.speed import BACKWARD, FORWARD, SHARES
from swarm_training.stages.rpc.answers import StageAnswer, StageAnswerReader
from swarm_training.stages.rpc.forms import FORMS
from swarm_training.stages.rpc.hosting import HostedStage, computed
from swarm_training.stages.rpc.room import RequestReservation, RequestRoom, StageLimits
from swarm_training.stages.rpc.validation import RequestReader, check_micro_batch, require_moment

if TYPE_CHECKING:
    from swarm_training.stages.engine.stage import StageGradients

    _Context = grpc.aio.ServicerContext[Any, Any]
_NAMES = {form: name for name, form in FORMS.items()}
_logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class AuditService:
    """The service for audits of one peer, which has given ``_answers`` and computes in ``_precision``. The other
    arguments are those of ``StagesService``."""

    _run: str
    _host: HostedStage
    _identity: Identity  # signs the answers
    _answers: AnswerLog
    _limits: StageLimits = field(default_factory=StageLimits)
    _access: AccessControl | None = None
    _precision: str = "fp32"

    def __post_init__(self) -> None:
        self._room = RequestRoom(self._limits)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that has not started."""
        add_service(self, audit_pb.DESCRIPTOR.services_by_name["Audits"], server)

    async def Attest(self, request: audit_pb.AttestRequest, context: _Context) -> audit_pb.AttestReply:
        trainer = admitted(context, self._access)
        check_micro_batch(request.micro_batch, self._run, self._host)
        statement = (await self._statement(trainer, request)).signed(self._identity)
        if request.withdraws:
            await asyncio.to_thread(self._host.sums.withdraw, request.micro_batch.number, trainer)
        return audit_pb.AttestReply(statement=statement)

    async def Accuse(self, requests: AsyncIterator[audit_pb.AccuseRequest], context: _Context) -> audit_pb.AccuseReply:
        trainer, peer = admitted(context, self._access), self._host.peer.peer
        with self._room.request(trainer) as reservation:
            async with asyncio.timeout(self._limits.read_s):
                statement, request, answer = await self._read(requests, reservation)
            is_upheld = statement.peer_id in peer.banned() or await self._is_wrong(statement, request, answer)
        if is_upheld and statement.peer_id not in peer.banned():
            peer.exclude(statement.peer_id)
        elif not is_upheld:
            _logger.warning("trainer %s has accused %s, whose answer is right", trainer, statement.peer_id)
        return audit_pb.AccuseReply(is_upheld=is_upheld)

    async def _read(
        self, requests: AsyncIterator[audit_pb.AccuseRequest], reservation: RequestReservation
    ) -> tuple[AnswerStatement, RequestReader, StageAnswerReader]:
        """Return the statement, the request and the answer of an accusation."""
        statement: AnswerStatement | None = None
        reader: RequestReader | None = None
        answer: StageAnswerReader | None = None
        async for message in requests:
            if (statement is None) != message.HasField("statement"):
                raise RequestRejected("an accusation begins with a statement, and has it once")
            if statement is None:
                statement = await self._checked(message)
                reader = RequestReader(self._host.stage, statement.is_backward, reservation, self._limits.max_tokens)
                reader.start(statement.work)
                answer = StageAnswerReader(evidence_form(statement.work.reply_form))
            assert reader is not None and answer is not None
            if message.HasField("request"):
                reader.take(message.request)
            if message.HasField("answer"):
                reservation.take(message.answer.ByteSize())
                answer.take(message.answer)
        if statement is None or reader is None or answer is None:
            raise RequestRejected("an accusation came without a message: expected a statement at first")
        return statement, reader, answer

    async def _statement(self, trainer: str, request: audit_pb.AttestRequest) -> AnswerStatement:
        """Return the statement. Raises PeerMoved if the answer is unknown, or its gradient is not pending any more."""
        if len(request.seed) != SEED_BYTES:
            raise RequestRejected(f"a seed has {len(request.seed)} bytes: expected {SEED_BYTES}")
        which = request.micro_batch
        given = self._answers.given(trainer, which, is_backward=request.is_backward)
        if given is None:
            raise PeerMoved(f"nothing is known here of an answer to micro-batch {which.number}")
        found: tuple[float, ...] = ()
        if request.is_backward and given.work.accumulates:
            # In a thread: another one may hold the lock of the sums for long, while it adds a gradient.
            gradients = await asyncio.to_thread(self._host.sums.pending, which.number, trainer)
            if gradients is None:
                raise PeerMoved(f"no gradient of micro-batch {which.number} is pending here")
            found = await asyncio.to_thread(sketch, gradients, request.seed)
        return AnswerStatement(
            self._identity.peer_id,
            given.work,
            request.is_backward,
            given.request,
            given.answer,
            request.seed,
            found,
        )

    async def _checked(self, message: audit_pb.AccuseRequest) -> AnswerStatement:
        """Return the statement in a message.

        Raises RequestRejected if it is invalid or this peer's own, PeerMoved if it is about another stage or step."""
        try:
            statement = await asyncio.to_thread(AnswerStatement.read, message.statement)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        if statement.peer_id == self._identity.peer_id:
            raise RequestRejected("a peer is accused before itself: expected one of its mates")
        check_micro_batch(statement.work.micro_batch, self._run, self._host)
        if bool(statement.sketch) != (statement.is_backward and statement.work.accumulates):
            raise RequestRejected("a statement has no sketch of the gradient that it is about, or one of none")
        return statement

    async def _is_wrong(self, statement: AnswerStatement, request: RequestReader, answer: StageAnswerReader) -> bool:
        """Return whether this peer computes something else than what was signed.

        Raises RequestRejected if the signature is not of this request and this answer, or one of them is incomplete."""
        tensors, said = await asyncio.to_thread(lambda: (request.tensors(), answer.answer()))
        digests = await asyncio.to_thread(lambda: (request_digest(tensors), answer_digest(said)))
        if digests != (statement.request, statement.answer):
            raise RequestRejected("a statement is about another request or answer than those that came with it")
        own = await self._compute(statement, tensors)
        tolerance = Tolerance.of(self._precision, _NAMES[statement.work.reply_form])
        return not agree(Testimony(statement.peer_id, said, statement.sketch), own, tolerance)

    async def _compute(self, statement: AnswerStatement, tensors: dict[str, Tensor]) -> Testimony:
        work, host, is_backward = statement.work, self._host, statement.is_backward

        def run() -> tuple[StageAnswer, StageGradients | None]:
            require_moment(work.micro_batch, host)
            return computed(host.stage, work, tensors, is_backward)

        answer, found = await host.peer.compute(run, SHARES[BACKWARD if is_backward else FORWARD])
        sketched: tuple[float, ...] = ()
        if statement.sketch and found is not None:
            sketched = await asyncio.to_thread(sketch, found.parameters, statement.seed)
        return Testimony(self._identity.peer_id, answer, sketched)
