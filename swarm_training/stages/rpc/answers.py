"""The answer of a stage peer to a request, and the messages in which it travels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as wire_pb
from swarm_protocol.wire.codec import Assembler, shown_shape
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.forms import check_header, decoded, encode_as
from swarm_training.stages.rpc.framing import TensorCollector, pack


@dataclass(frozen=True)
class StageAnswer:
    """A peer's answer to a request."""

    # [rows, positions, width], a forward output or the gradient of the input; None if none was asked for.
    tensor: Tensor | None = None
    # ``loss_sum``, ``num_tokens``: the summed loss and the number of its tokens, from the last stage; else 0.
    loss_sum: float = 0.0
    num_tokens: int = 0


class StageAnswerReader:
    """The reader of one answer's messages, which checks headers as they come. Raises RequestRejected."""

    def __init__(self, form: pb.Form, shape: Sequence[int] | None = None) -> None:
        """Begin without messages. ``shape``: the expected rows and positions; None: any."""
        self._form, self._shape = form, shape
        self._arriving = TensorCollector(("tensor",), self._begin)
        self._first: pb.ComputeReply | None = None

    def _begin(self, _: str, wire: wire_pb.Tensor) -> Assembler:
        check_header(self._form, wire)
        if self._shape is not None and (len(wire.shape) != 3 or list(wire.shape[:2]) != list(self._shape)):
            raise RequestRejected(f"the answer has shape {shown_shape(wire)}: expected {[*self._shape, 'hidden']}")
        return Assembler(wire)

    def take(self, reply: pb.ComputeReply) -> None:
        self._first = self._first or reply
        self._arriving.take(reply)

    def answer(self) -> StageAnswer:
        self._arriving.require_complete()
        if self._first is None:
            raise RequestRejected("the answer is empty")
        found = self._arriving.found.get("tensor")
        tensor = None if found is None else decoded(self._form, found)
        return StageAnswer(tensor, self._first.loss_sum, self._first.num_tokens)


def read_answer(form: pb.Form, replies: Iterable[pb.ComputeReply]) -> StageAnswer:
    """Return the answer in these replies. Raises RequestRejected if they are not a complete answer in this form."""
    reader = StageAnswerReader(form)
    for reply in replies:
        reader.take(reply)
    return reader.answer()


def replies_of(answer: StageAnswer, form: pb.Form) -> Iterator[pb.ComputeReply]:
    """Return the messages of an answer, whose tensor travels in this form."""
    first = pb.ComputeReply(loss_sum=answer.loss_sum, num_tokens=answer.num_tokens)
    return pack(first, [] if answer.tensor is None else [("tensor", encode_as(form, answer.tensor))])
