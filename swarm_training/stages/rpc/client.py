"""A trainer's calls of stage peers over gRPC. The TLS certificate in a peer's signed record identifies the peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from swarm_protocol.errors import BadReply, NotFinite, PeerError, PeerUnavailable, RequestRejected
from swarm_protocol.pb import swarm_pb2 as wire_pb
from swarm_protocol.rpc.channels import translated
from swarm_protocol.wire.codec import Assembler, encode, encode_whole, shown_shape
from swarm_protocol.wire.status import FirstStatus
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.pb.stages_pb2_grpc import StagesStub
from swarm_training.stages.rpc.forms import check_header, decoded, encode_as, form_named
from swarm_training.stages.rpc.framing import Named, TensorCollector, pack
from swarm_training.stages.rpc.validation import GRAD, INPUTS, LABELS, WIRE_VERSION


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch at a stage."""

    stage: int
    moment: Moment
    number: int


@dataclass(frozen=True)
class WireForms:
    """The forms in which activations and gradients travel, in both directions. Raises ValueError for unknown ones."""

    activations: str = "fp32"
    gradients: str = "fp32"

    def __post_init__(self) -> None:
        form_named(self.activations)
        form_named(self.gradients)


@dataclass(frozen=True)
class BackwardReply:
    """The reply to a backward call.

    Attributes:
        grad: [rows, positions, hidden], of the stage's inputs; None from the first stage, and if it was not asked for.
        loss_sum, num_tokens: the summed loss and the number of its tokens, from the last stage; else 0.
    """

    grad: Tensor | None
    loss_sum: float = 0.0
    num_tokens: int = 0


class StagesClient:
    """A trainer's client of stage peers.

    Calls raise PeerError (PeerUnavailable, PeerBusy, PeerMoved, BadReply), RequestRejected or AccessDenied."""

    def __init__(self, network: GrpcNetwork, run: str, forms: WireForms) -> None:
        """Set up the client. ``run``: the name of the run without the number of a stage."""
        self._network = network
        self._run = run
        self._activations, self._gradients = form_named(forms.activations), form_named(forms.gradients)

    async def forward(
        self, peer: Progress, which: MicroBatch, inputs: Tensor, timeout_s: float, *, forward_only: bool = False
    ) -> Tensor:
        """Return the output of a stage, [rows, positions, hidden]. The last stage is not asked: it has the loss.

        inputs: token ids [rows, positions] int64 of the first stage, else hidden states [rows, positions, hidden].
        forward_only: no ``backward`` follows.
        """
        work, given = (
            self.forward_work(which, forward_only=forward_only),
            [(INPUTS, encode_as(self._activations, inputs))],
        )
        _, found = await self._call(peer, "Forward", work, given, inputs.shape[:2], timeout_s)
        if found is None:
            raise BadReply("a stage's output is missing in its answer", peer.peer_id)
        return found

    async def backward(
        self,
        peer: Progress,
        which: MicroBatch,
        inputs: Tensor,
        timeout_s: float,
        *,
        labels: Tensor | None = None,
        grad: Tensor | None = None,
        loss_scale: float = 1.0,
        accumulates: bool,
        wants_grad: bool,
    ) -> BackwardReply:
        """Have the stage's gradients computed; those of its weights stay pending at the peer if it ``accumulates``.

        labels: [rows, positions] int64, for the last stage. grad: [rows, positions, hidden], of another stage's output.
        """
        work = self.backward_work(which, accumulates=accumulates, wants_grad=wants_grad, loss_scale=loss_scale)
        given = [(INPUTS, encode_as(self._activations, inputs))]
        if labels is not None:
            given.append((LABELS, encode(labels)))
        if grad is not None:
            given.append((GRAD, encode_as(self._gradients, grad)))
        first, found = await self._call(peer, "Backward", work, given, inputs.shape[:2], timeout_s)
        if wants_grad and (found is None or found.shape != inputs.shape):
            raise BadReply("the gradient of a stage's inputs is missing, or has another shape", peer.peer_id)
        if labels is not None and not isfinite(first.loss_sum):
            raise NotFinite("the loss is not finite", peer.peer_id)
        return BackwardReply(found if wants_grad else None, first.loss_sum, first.num_tokens)

    async def commit(self, peer: Progress, which: MicroBatch, timeout_s: float) -> bool:
        """Return whether the gradient of this trainer's backward counts there now; if not, it is lost."""
        return await self._commit(peer, pb.CommitRequest(micro_batch=self.named(which)), timeout_s)

    async def note_not_finite(
        self, peer: Progress, which: MicroBatch, ids: Tensor, labels: Tensor, timeout_s: float
    ) -> bool:
        """Report to a peer of the last stage that some answer is not finite, whichever peer computes it.

        The peer finds out itself, and refuses if it finds otherwise. Return False if the run has no checkpoint to go
        back to. ids, labels: [rows, positions] int64.
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

    def forward_work(self, which: MicroBatch, *, forward_only: bool = False) -> pb.Work:
        """Return the work that ``forward`` asks for."""
        return self._work(which, self._activations, forward_only=forward_only)

    def backward_work(
        self, which: MicroBatch, *, accumulates: bool, wants_grad: bool, loss_scale: float = 1.0
    ) -> pb.Work:
        """Return the work that ``backward`` asks for."""
        return self._work(which, self._gradients, accumulates=accumulates, wants_grad=wants_grad, loss_scale=loss_scale)

    def _work(self, which: MicroBatch, reply_form: pb.Form, **options: Any) -> pb.Work:
        return pb.Work(
            micro_batch=self.named(which),
            inputs_form=self._activations,
            grad_form=self._gradients,
            reply_form=reply_form,
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
    ) -> tuple[pb.ComputeReply, Tensor | None]:
        """Return the answer's first message, and its tensor, if any. ``shape``: the expected rows and positions."""

        def begin(_: str, wire: wire_pb.Tensor) -> Assembler:
            check_header(work.reply_form, wire)
            if len(wire.shape) != 3 or list(wire.shape[:2]) != list(shape):
                raise RequestRejected(f"the answer has shape {shown_shape(wire)}: expected {[*shape, 'hidden']}")
            return Assembler(wire)

        stub = await self._stub(peer)
        arriving, first = TensorCollector(("tensor",), begin), None
        async with answering(peer, timeout_s):
            call = getattr(stub, method)(pack(pb.ComputeRequest(work=work), given))
            try:
                async with translated(peer.peer_id, FirstStatus(call)):
                    async for reply in call:
                        first = first or reply
                        try:
                            arriving.take(reply)
                        except RequestRejected as error:
                            raise BadReply(str(error), peer.peer_id) from None
            finally:
                call.cancel()
        try:
            arriving.finish()
        except RequestRejected as error:
            raise BadReply(str(error), peer.peer_id) from None
        if first is None:
            raise BadReply("the answer is empty", peer.peer_id)
        if "tensor" not in arriving.found:
            return first, None
        tensor = decoded(work.reply_form, arriving.found["tensor"])
        if not bool(torch.isfinite(tensor).all()):
            raise NotFinite("the answer of a stage is not finite (it contains NaN or infinity)", peer.peer_id)
        return first, tensor

    async def _stub(self, peer: Progress) -> Any:
        return StagesStub(await self._network.channel(peer))  # type: ignore[no-untyped-call]


@asynccontextmanager
async def answering(peer: Progress, timeout_s: float) -> AsyncIterator[None]:
    """Name the peer in errors. Raises PeerUnavailable if there is no answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            async with translated():
                yield
    except TimeoutError:
        raise PeerUnavailable(f"no answer within {timeout_s:g} s", peer.peer_id) from None
    except PeerError as error:
        error.name_server(peer.peer_id)
        raise
