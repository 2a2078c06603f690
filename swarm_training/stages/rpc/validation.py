"""The checks of a trainer's request before a stage peer takes memory or time for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import torch

from swarm_protocol.errors import PeerMoved, RequestRejected
from swarm_protocol.pb import swarm_pb2 as wire_pb
from swarm_protocol.wire.codec import Assembler, shown_shape
from swarm_protocol.wire.constants import MAX_BATCH_SIZE
from swarm_protocol.wire.printable import printable
from swarm_training.core.moment import Moment
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.forms import check_form, check_header, decoded
from swarm_training.stages.rpc.framing import TensorCollector
from swarm_training.stages.rpc.hosting import HostedStage
from swarm_training.stages.rpc.room import RequestReservation

if TYPE_CHECKING:
    from swarm_training.stages.engine.stage import Stage

WIRE_VERSION = 1
INPUTS, LABELS, GRAD = FIELDS = ("inputs", "labels", "grad")
_NAME_CHARS = 60


def moment_of(message: pb.MicroBatch) -> Moment:
    return Moment(message.rollbacks, message.step)


def check_micro_batch(message: pb.MicroBatch, run: str, host: HostedStage) -> None:
    """Check that this peer can compute the micro-batch. Raise PeerMoved if the trainer speaks another version, or means
    another run, stage or step than this peer is at; RequestRejected if there is no such micro-batch."""
    if message.wire_version != WIRE_VERSION:
        raise PeerMoved(f"this peer speaks version {WIRE_VERSION} of stages, the trainer {message.wire_version}")
    if (message.run, message.stage) != (run, host.stage.index):
        shown = printable(message.run, _NAME_CHARS)
        raise PeerMoved(
            f"this peer has stage {host.stage.index} of run {run}, not stage {message.stage} of run {shown}"
        )
    require_moment(message, host)
    if message.number >= host.sums.num_micro_batches:
        raise RequestRejected(
            f"there is no micro-batch {message.number}: expected 0 to {host.sums.num_micro_batches - 1}"
        )


def require_moment(message: pb.MicroBatch, host: HostedStage) -> None:
    """Check a request's moment. Raises PeerMoved if the peer is at another step."""
    if moment_of(message) != host.moment:
        raise PeerMoved(
            f"micro-batch {message.number} is of step {message.step} after {message.rollbacks} rollbacks: this peer is "
            f"at step {host.moment.step} after {host.moment.rollbacks}"
        )


def form_of(work: pb.Work, name: str) -> pb.Form:
    """Return the form in which a tensor of a request travels."""
    return work.grad_form if name == GRAD else work.inputs_form


def tokens_of(wire: wire_pb.Tensor, reservation: RequestReservation, max_tokens: int) -> torch.Tensor:
    """Return token ids that came in one piece, [rows, positions] int64. Raise RequestRejected if the tensor has no
    token ids, or too many; PeerBusy if there is no room for them."""
    shape = list(wire.shape[:3])  # no more than shows that there are too many: a stranger may give any number
    if len(shape) != 2 or min(shape) < 1 or wire.dtype != wire_pb.INT64 or wire.codec != wire_pb.RAW:
        raise RequestRejected(f"token ids have shape {shown_shape(wire)}: expected [rows, positions] of int64")
    _require_size(shape[0], shape[1], max_tokens)
    reservation.take(wire.size_bytes)
    assembler = Assembler(wire)
    if not assembler.complete:
        raise RequestRejected(f"token ids have {assembler.received_bytes} of {assembler.size_bytes} bytes")
    return assembler.tensor()


def _require_size(rows: int, positions: int, max_tokens: int) -> None:
    """Check the size of a micro-batch. Raises RequestRejected if it is too large."""
    if rows > MAX_BATCH_SIZE or rows * positions > max_tokens:
        raise RequestRejected(
            f"a micro-batch has {rows} × {positions} positions: expected at most {MAX_BATCH_SIZE} rows, and "
            f"{max_tokens} in all"
        )


@dataclass
class RequestReader:
    """The reader of one request's messages, which checks each header as it comes. Inputs come first, since labels and
    gradient must have their shape."""

    stage: Stage
    is_backward: bool
    reservation: RequestReservation
    max_tokens: int
    work: pb.Work = field(default_factory=pb.Work)
    _arriving: TensorCollector = field(init=False)
    _shape: tuple[int, int] = (0, 0)  # rows and positions of the inputs

    def __post_init__(self) -> None:
        self._arriving = TensorCollector(FIELDS, self._begin)

    def start(self, work: pb.Work) -> None:
        """Begin a request. Raises RequestRejected if what is asked for is out of range."""
        for form in (work.inputs_form, work.grad_form, work.reply_form):
            check_form(form)
        if self.is_backward and self.stage.is_last and not 0 < work.loss_scale < inf:
            raise RequestRejected(f"loss_scale is {work.loss_scale}: expected a number above 0")
        self.work = work

    def take(self, message: pb.ComputeRequest) -> None:
        """Take a message. Raises RequestRejected if it is wrong, PeerBusy if there is no room for what it announces."""
        self._arriving.take(message)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all finite tensors of this call, by field: [rows, positions, width], or token ids [rows, positions].
        Raise RequestRejected if one is missing, incomplete or not finite."""
        self._arriving.require_complete()
        found = self._arriving.found
        for name in FIELDS:
            if self._takes(name) and name not in found:
                raise RequestRejected(f"{name} are missing: stage {self.stage.index} expects them")
        result = {}
        for name, assembler in found.items():
            tensor = assembler.tensor() if self._has_tokens(name) else decoded(form_of(self.work, name), assembler)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise RequestRejected(f"{name} are not finite (they contain NaN or infinity)")
            result[name] = tensor
        return result

    def _takes(self, name: str) -> bool:
        if name == LABELS:
            return self.stage.is_last
        return name == INPUTS or (self.is_backward and not self.stage.is_last)

    def _has_tokens(self, name: str) -> bool:
        return name == LABELS or (name == INPUTS and self.stage.is_first)

    def _begin(self, name: str, wire: wire_pb.Tensor) -> Assembler:
        if not self._takes(name):
            raise RequestRejected(f"{name} came: stage {self.stage.index} expects none in this call")
        if name == INPUTS:
            self._shape = self._checked_inputs(wire)
        rows, positions = self._shape
        expected = [rows, positions] if self._has_tokens(name) else [rows, positions, self.stage.width]
        if list(wire.shape) != expected:
            raise RequestRejected(f"{name} have shape {shown_shape(wire)}: expected {expected}")
        if self._has_tokens(name):
            if wire.dtype != wire_pb.INT64 or wire.codec != wire_pb.RAW:
                raise RequestRejected(f"{name} came with dtype {wire.dtype}: expected token ids in int64")
        else:
            check_header(form_of(self.work, name), wire)
        self.reservation.take(wire.size_bytes)
        return Assembler(wire)

    def _checked_inputs(self, wire: wire_pb.Tensor) -> tuple[int, int]:
        shape = list(wire.shape[:4])
        if len(shape) != (2 if self.stage.is_first else 3) or min(shape) < 1:
            expected = "[rows, positions]" if self.stage.is_first else f"[rows, positions, {self.stage.width}]"
            raise RequestRejected(f"inputs have shape {shown_shape(wire)}: expected {expected}")
        _require_size(shape[0], shape[1], self.max_tokens)
        return shape[0], shape[1]
