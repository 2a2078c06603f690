"""Turns what gRPC raises into our errors; the only place of the client that knows its status codes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import PeerUnavailable, from_status
from swarm_protocol.span import Span


def no_answer(server: ServerRecord, span: Span, timeout_s: float) -> PeerUnavailable:
    return PeerUnavailable(f"server {server.short_id} did not answer within {timeout_s:g} s", server.peer_id, span)


@asynccontextmanager
async def translated(
    server: ServerRecord, span: Span | None = None, call: grpc.aio.Call | None = None
) -> AsyncIterator[None]:
    """Turns grpc's errors into ours."""
    try:
        yield
    except grpc.RpcError as error:
        details = re.sub(r"^Stream removed \((.*)\)$", r"\1", error.details() or "no details")
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            details = f"server {server.short_id} at {server.addresses[0]} cannot be reached: {details}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"server {server.short_id} at {server.addresses[0]} does not answer"
        raise from_status(error.code(), details, server.peer_id, span) from None
    except asyncio.InvalidStateError:  # the server has ended the stream before it was told everything
        assert call is not None, "only streams are told something"
        code = await call.code()
        if code is grpc.StatusCode.OK:
            details = f"the stream to server {server.short_id} has ended"
            raise PeerUnavailable(details, server.peer_id, span) from None
        raise from_status(code, await call.details(), server.peer_id, span) from None
