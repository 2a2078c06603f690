"""The streams of passes without a session: writes their requests and reads their answers."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_client.adapters.snapshots import AdapterPart
from swarm_client.transport.answers import read_tensors
from swarm_client.transport.grpc_calls import CallCounter, bad_reply, translated
from swarm_client.transport.wire_tensor import WireTensor
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span


class PassCalls:
    """The pass calls to one server."""

    def __init__(self, stub: CallCounter, record: ServerRecord, timeout_s: float) -> None:
        self._stub = stub
        self._record = record
        self._timeout_s = timeout_s

    async def forward(self, span: Span, message: pb.Forward, hidden: WireTensor) -> tuple[WireTensor, pb.TensorReply]:
        """Return the output of a forward pass, and the first message of the answer."""
        call = self._stub.Forward(timeout=self._timeout_s)
        async with translated(self._record, span, call):
            await call.write(pb.ForwardRequest(forward=message))
            for part in hidden.parts:
                await call.write(pb.ForwardRequest(more=part))
            await call.done_writing()
            ((output, reply),) = await read_tensors(call, [hidden.header], self._record, span)
        return output, reply

    async def backward(
        self,
        span: Span,
        first: pb.BackwardRequest,
        parts: Sequence[bytes],
        grad: WireTensor,
        expected: Sequence[pb.Tensor],
    ) -> tuple[WireTensor, list[WireTensor] | None]:
        """Return gradients of inputs and adapter (None if summed). ``parts``: further parts of the hidden states."""
        call = self._stub.Backward(timeout=self._timeout_s)
        async with translated(self._record, span, call):
            await call.write(first)
            for part in parts:
                await call.write(pb.BackwardRequest(more=part))
            await call.write(pb.BackwardRequest(grad=grad.header))
            for part in grad.parts:
                await call.write(pb.BackwardRequest(more=part))
            await call.done_writing()
            (input_grad, reply), *grads = await read_tensors(call, expected, self._record, span)
        if reply.summed and not first.HasField("summand"):  # the gradients would be lost
            raise bad_reply(self._record, span, "sent a broken answer")
        return input_grad, None if reply.summed else [grad for grad, _ in grads]

    async def take_sum(self, span: Span, request: pb.TakeSum, expected: Sequence[pb.Tensor]) -> list[WireTensor]:
        """Return the sum of an adapter's gradients, with the shapes and dtypes of ``expected``."""
        call = self._stub.Backward(timeout=self._timeout_s)
        async with translated(self._record, span, call):
            await call.write(pb.BackwardRequest(take_sum=request))
            await call.done_writing()
            tensors = [tensor for tensor, _ in await read_tensors(call, expected, self._record, span)]
        if len(tensors) < len(expected):
            raise bad_reply(self._record, span, "sent a broken answer")
        return tensors


def expected_grads(adapter: AdapterPart | None) -> list[pb.Tensor]:
    """Return headers with the shape and dtype of the gradients of an adapter's tensors."""
    return [pb.Tensor(dtype=pb.FLOAT32, shape=shape) for shape in (() if adapter is None else adapter.shapes)]
