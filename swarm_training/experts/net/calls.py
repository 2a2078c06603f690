"""The calls of experts over gRPC. Each server is authenticated by the TLS certificate in its signed record."""

from __future__ import annotations

import torch

from swarm_protocol.errors import BadReply, NotFinite, RequestRejected
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.pb import swarm_pb2
from swarm_protocol.rpc.channels import PinnedChannels, translated
from swarm_protocol.rpc.stubs import ServiceStub
from swarm_protocol.wire.codec import decode, encode
from swarm_training.experts.core.cells import Cell
from swarm_training.experts.core.config import MAX_CALL_BYTES
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.pb import experts_pb2 as pb


class ServerCalls:
    """The calls to servers of experts over gRPC, with channels that are kept open. Used on one event loop only."""

    def __init__(self, credentials: ClientCredentials) -> None:
        self._channels = PinnedChannels(credentials)

    async def close(self) -> None:
        await self._channels.close()

    async def _stub(self, holder: ExpertHolder) -> ServiceStub:
        channel = await self._channels.to(holder.address, holder.tls_fingerprint, holder.peer_id)
        return ServiceStub(pb.DESCRIPTOR.services_by_name["Experts"], channel)


class GrpcCalls(ServerCalls):
    """The calls of experts. Tensors are [rows, hidden] fp32 on the CPU. Calls raise SwarmError."""

    async def forward(self, holder: ExpertHolder, name: str, cell: Cell, inputs: torch.Tensor) -> torch.Tensor:
        """Return the expert's outputs."""
        reply = await self.send_forward(holder, pb.ForwardRequest(name=name, cell=cell, inputs=encode(inputs)[0]))
        return _checked(reply.outputs, inputs, holder)

    async def backward(
        self, holder: ExpertHolder, name: str, cell: Cell, inputs: torch.Tensor, grad_outputs: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the inputs; the expert takes an optimizer step."""
        stub = await self._stub(holder)
        request = pb.BackwardRequest(
            name=name, cell=cell, inputs=encode(inputs)[0], grad_outputs=encode(grad_outputs)[0]
        )
        async with translated(holder.peer_id):
            reply = await stub.Backward(request)
        return _checked(reply.grad_inputs, inputs, holder)

    async def send_forward(self, holder: ExpertHolder, request: pb.ForwardRequest) -> pb.ForwardReply:
        """Return the unchecked answer."""
        stub = await self._stub(holder)
        async with translated(holder.peer_id):
            reply: pb.ForwardReply = await stub.Forward(request)
            return reply


def _checked(wire: swarm_pb2.Tensor, inputs: torch.Tensor, holder: ExpertHolder) -> torch.Tensor:
    """Return the received tensor. Raise BadReply if it is not like the inputs."""
    try:
        tensor = decode(wire, MAX_CALL_BYTES)
    except RequestRejected as error:
        raise BadReply(f"an expert's answer cannot be read: {error}", holder.peer_id) from None
    if tensor.shape != inputs.shape or tensor.dtype != inputs.dtype:
        raise BadReply(
            f"an expert has answered {list(tensor.shape)} of {tensor.dtype}: expected {list(inputs.shape)} of "
            f"{inputs.dtype}",
            holder.peer_id,
        )
    if not bool(torch.isfinite(tensor).all()):
        raise NotFinite("an expert's answer is not finite (it contains NaN or infinity)", holder.peer_id)
    return tensor
