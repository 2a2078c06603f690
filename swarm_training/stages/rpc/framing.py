"""The framing of a call's tensors as messages below the limit of gRPC, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as wire_pb
from swarm_protocol.wire.codec import Assembler
from swarm_protocol.wire.constants import PART_BYTES
from swarm_training.stages.pb import stages_pb2 as pb

M = TypeVar("M", pb.ComputeRequest, pb.ComputeReply)
Named = tuple[str, tuple[wire_pb.Tensor, list[bytes]]]  # the field, the tensor and the parts that follow it
_MESSAGE_BYTES = PART_BYTES + PART_BYTES // 2  # tensor bytes in one message; one more part would be over the limit


def pack(first: M, named: Iterable[Named]) -> Iterator[M]:
    """Yield the messages of a call. Tensors, or their first parts, are in ``first`` as far as they fit."""
    message, size_bytes = first, 0
    for field, (wire, parts) in named:
        if size_bytes + len(wire.data) > _MESSAGE_BYTES:
            yield message
            message, size_bytes = type(first)(), 0
        getattr(message, field).CopyFrom(wire)
        size_bytes += len(wire.data)
        for part in parts:
            yield message
            message, size_bytes = type(first)(part=part), len(part)
    yield message


class TensorCollector:
    """The collector of one call's tensors."""

    def __init__(self, fields: tuple[str, ...], begin: Callable[[str, wire_pb.Tensor], Assembler]) -> None:
        """Start with no tensors. ``begin``: checks a tensor's header and starts to collect the tensor."""
        self._fields = fields
        self._begin = begin
        self._last: Assembler | None = None
        self.found: dict[str, Assembler] = {}

    def take(self, message: M) -> None:
        """Take a message. Raises RequestRejected if it does not follow the one before, and what ``begin`` raises."""
        if message.part:
            if self._last is None:
                raise RequestRejected("a part of a tensor came without its beginning")
            self._last.add(message.part)
        for field in self._fields:
            if message.HasField(field):
                self.require_complete()
                if field in self.found:
                    raise RequestRejected(f"a call has two tensors of the name {field}: expected one")
                self._last = self.found[field] = self._begin(field, getattr(message, field))

    def require_complete(self) -> None:
        """Raise RequestRejected if parts of a tensor are missing."""
        if self._last is not None and not self._last.complete:
            raise RequestRejected(
                f"only {self._last.received_bytes} of {self._last.size_bytes} bytes of a tensor arrived"
            )
