"""A trainer's calls of stage peers over gRPC. The TLS certificate in a peer's signed record identifies the peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from swarm_protocol.errors import BadReply, NotFinite, PeerError, PeerUnavailable, RequestRejected
from swarm_protocol.rpc.channels import translated
from swarm_protocol.rpc.stubs import ServiceStub
from swarm_protocol.wire.codec import encode_whole
from swarm_protocol.wire.status import FirstStatus
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.answers import StageAnswer, StageAnswerReader
from swarm_training.stages.rpc.forms import FORMS, encode_as
from swarm_training.stages.rpc.framing import Named, pack
from swarm_training.stages.rpc.validation import GRAD, INPUTS, LABELS, WIRE_VERSION, form_of


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch at a stage."""

    stage: int
    moment: Moment
    number: int


@dataclass(frozen=True)
class WireForms:
    """The forms in which activations and gradients travel, in both directions."""

    activations: str = "fp32"
    gradients: str = "fp32"


@dataclass(frozen=True)
class StageRequest:
    """A request to a peer of a stage."""

    which: MicroBatch
    inputs: Tensor  # token ids [rows, positions] int64 of the first stage, else hidden states [rows, positions, hidden]
    labels: Tensor | None = None  # [rows, positions] int64, for the backward pass of the last stage
    grad: Tensor | None = None  # [rows, positions, hidden], of the output, for the backward pass of another stage
    loss_scale: float = 1.0
    accumulates: bool = False  # whether the gradients of the stage's weights stay pending at the peer
    wants_grad: bool = False  # whether the answer has the gradient of the inputs
    is_backward: bool = False
    forward_only: bool = False  # whether no backward pass follows a forward pass

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field, in the order in which they travel."""
        found = {INPUTS: self.inputs, LABELS: self.labels, GRAD: self.grad}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


class StagesClient:
    """A trainer's client of stage peers.

    Calls raise PeerError (PeerUnavailable, PeerBusy, PeerMoved, BadReply), RequestRejected or AccessDenied."""

    def __init__(self, network: GrpcNetwork, run: str, forms: WireForms) -> None:
        """Set up the client. ``run``: the name of the run without the number of a stage."""
        self._network = network
        self._run = run
        self._activations, self._gradients = FORMS[forms.activations], FORMS[forms.gradients]

    async def ask(self, asked: StageRequest, peer: Progress, timeout_s: float) -> StageAnswer:
        """Return the answer, checked. The last stage has the loss, and gets backward passes alone."""
        work, shape = self.work(asked), asked.inputs.shape
        given = [(name, encode_as(form_of(work, name), tensor)) for name, tensor in asked.tensors().items()]
        answer = await self._call(
            peer, "Backward" if asked.is_backward else "Forward", work, given, shape[:2], timeout_s
        )
        tensor = answer.tensor
        if not asked.is_backward:
            if tensor is None:
                raise BadReply("a stage's output is missing in its answer", peer.peer_id)
            return StageAnswer(tensor)
        if asked.wants_grad and (tensor is None or tensor.shape != shape):
            raise BadReply("the gradient of a stage's inputs is missing, or has another shape", peer.peer_id)
        if asked.labels is not None and not isfinite(answer.loss_sum):
            raise NotFinite("the loss is not finite", peer.peer_id)
        return answer if asked.wants_grad else replace(answer, tensor=None)

    async def commit(self, peer: Progress, which: MicroBatch, timeout_s: float) -> bool:
        """Return whether the gradient of this trainer's backward pass counts at the peer now; if not, it is lost."""
        return await self._commit(peer, pb.CommitRequest(micro_batch=self.named(which)), timeout_s)

    async def note_not_finite(
        self, peer: Progress, which: MicroBatch, ids: Tensor, labels: Tensor, timeout_s: float
    ) -> bool:
        """Report to a peer of the last stage that some answer is not finite, whichever peer computes it.

        The peer computes all stages' answers itself, and rejects the report if they are finite. Return False if the run
        has no checkpoint to go back to. ids, labels: [rows, positions] int64.
        """
        request = pb.CommitRequest(
            micro_batch=self.named(which), is_not_finite=True, ids=encode_whole(ids), labels=encode_whole(labels)
        )
        return await self._commit(peer, request, timeout_s)

    async def _commit(self, peer: Progress, request: pb.CommitRequest, timeout_s: float) -> bool:
        stub = await self._stub(peer)
        async with answering(peer, timeout_s):
            reply: pb.CommitReply = await stub.Commit(request)
            return reply.is_committed

    def work(self, asked: StageRequest) -> pb.Work:
        """Return the work that ``ask`` asks for."""
        form, options = self._activations, {"forward_only": asked.forward_only}
        if asked.is_backward:
            form = self._gradients
            options = {name: getattr(asked, name) for name in ("accumulates", "wants_grad", "loss_scale")}
        return pb.Work(
            micro_batch=self.named(asked.which),
            inputs_form=self._activations,
            grad_form=self._gradients,
            reply_form=form,
            **options,
        )

    def named(self, which: MicroBatch) -> pb.MicroBatch:
        """Return the message that names the micro-batch to peers."""
        return pb.MicroBatch(
            wire_version=WIRE_VERSION,
            run=self._run,
            stage=which.stage,
            rollbacks=which.moment.rollbacks,
            step=which.moment.step,
            number=which.number,
        )

    async def _call(
        self, peer: Progress, method: str, work: pb.Work, given: list[Named], shape: torch.Size, timeout_s: float
    ) -> StageAnswer:
        """Return the answer. ``shape``: the expected rows and positions."""
        stub, reader = await self._stub(peer), StageAnswerReader(work.reply_form, shape)
        async with answering(peer, timeout_s):
            call = getattr(stub, method)(pack(pb.ComputeRequest(work=work), given))
            try:
                async with translated(peer.peer_id, FirstStatus(call)):
                    async for reply in call:
                        with _blamed(peer):
                            reader.take(reply)
            finally:
                call.cancel()  # a peer whose answer is wrong would send the rest of it
        with _blamed(peer):
            answer = reader.answer()
        if answer.tensor is not None and not bool(torch.isfinite(answer.tensor).all()):
            raise NotFinite("the answer of a stage is not finite (it contains NaN or infinity)", peer.peer_id)
        return answer

    async def _stub(self, peer: Progress) -> ServiceStub:
        return await self._network.stub(pb.DESCRIPTOR.services_by_name["Stages"], peer)


@contextmanager
def _blamed(peer: Progress) -> Iterator[None]:
    """Raise BadReply, which names the peer, in place of RequestRejected: the reader of an answer has raised it."""
    try:
        yield
    except RequestRejected as error:
        raise BadReply(str(error), peer.peer_id) from None


@asynccontextmanager
async def answering(peer: Progress, timeout_s: float) -> AsyncIterator[None]:
    """Translate the errors of a call, and name the peer in them. Raises PeerUnavailable if no answer comes in time."""
    try:
        async with asyncio.timeout(timeout_s):
            async with translated():
                yield
    except TimeoutError:
        raise PeerUnavailable(f"no answer within {timeout_s:g} s", peer.peer_id) from None
    except PeerError as error:
        error.name_server(peer.peer_id)
        raise
