"""Reads the tensors in a server's answer to a pass, and refuses malformed answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from swarm_client.transport.grpc_calls import bad_reply
from swarm_client.transport.wire_tensor import WireTensor
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.codec import Assembler


async def read_tensors(
    call: grpc.aio.StreamStreamCall[Any, Any], expected: Sequence[pb.Tensor], server: ServerRecord, span: Span
) -> list[tuple[WireTensor, pb.TensorReply]]:
    """Return the answer's tensors, which must have these shapes and dtypes, each with its first message.

    Return only the first tensor if the server has added the others to a sum. Raise BadReply if the answer is malformed;
    the caller's ``translated`` then cancels the call.
    """
    replies, tensors = aiter(call), []
    for like in expected:
        tensor = await _read_tensor(replies, like, server, span)
        if tensor is None:
            raise bad_reply(server, span, "sent a broken answer")
        tensors.append(tensor)
        if tensors[0][1].summed:
            break
    async for _ in replies:
        raise bad_reply(server, span, "sent a broken answer")
    return tensors


async def _read_tensor(
    replies: AsyncIterator[pb.TensorReply], like: pb.Tensor, server: ServerRecord, span: Span
) -> tuple[WireTensor, pb.TensorReply] | None:
    """Return the next tensor and its first message; None if the answer has no whole tensor."""
    first = await anext(replies, None)
    if first is None or first.WhichOneof("kind") != "output":
        return None
    header, parts = first.output, []
    _require_like(like, header, server, span)
    missing = header.size_bytes - len(header.data)
    while missing > 0:
        reply = await anext(replies, None)
        if reply is None or reply.WhichOneof("kind") != "more" or not reply.more:
            return None
        parts.append(reply.more)
        missing -= len(reply.more)
    return (WireTensor(header, tuple(parts)), first) if missing == 0 else None


def require_readable(header: pb.Tensor, server: ServerRecord, span: Span) -> None:
    """Raise BadReply, before more of the answer is read, if the tensor makes no sense or is too large."""
    try:
        Assembler(header)
    except RequestRejected as error:
        raise bad_reply(server, span, f"sent a broken answer: {error}") from None


def _require_like(sent: pb.Tensor, received: pb.Tensor, server: ServerRecord, span: Span) -> None:
    """Raise BadReply, before more of the answer is read, unless shape and dtype are those that were sent."""
    require_readable(received, server, span)
    if (received.dtype, list(received.shape)) != (sent.dtype, list(sent.shape)):
        found = f"{list(received.shape)} of {pb.DType.Name(received.dtype)}"
        expected = f"{list(sent.shape)} of {pb.DType.Name(sent.dtype)}"
        raise bad_reply(server, span, f"answered {found}: expected {expected}")
