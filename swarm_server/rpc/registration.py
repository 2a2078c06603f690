"""Registration of the service with a gRPC server: it maps errors to gRPC statuses, and counts calls and bytes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import MethodDescriptor

from swarm_protocol.errors import AccessDenied, PeerError, RequestRejected
from swarm_protocol.rpc.serving import stream_handler
from swarm_protocol.rpc.stubs import BLOCKS
from swarm_protocol.telemetry.tracing import UNRECORDED, TraceSpan, tracing
from swarm_protocol.wire.printable import printable
from swarm_protocol.wire.status import end_with, status_of
from swarm_server.core.counters import Counters
from swarm_server.rpc.service import BlocksService

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
_logger = logging.getLogger(__name__)
_REFUSALS = (RequestRejected, AccessDenied, PeerError)
# Work for a request. The others only ask, or belong to several requests.
_TRACED = {"Session", "Forward", "Backward", "PutAdapter", "Reroute", "Copy"}


@asynccontextmanager
async def errors_as_status(context: _Context, counters: Counters) -> AsyncIterator[None]:
    """Answer our errors with their gRPC status; log any other error here and answer it with one sentence.

    The handler must return after that, see ``end_with``.
    """
    try:
        yield
    except _REFUSALS as error:
        counters.refusals[status_of(error).name] += 1
        end_with(context, status_of(error), printable(str(error)))
    except grpc.aio.BaseError as error:
        _logger.debug("a client went away: %s", error)
    except Exception:  # a defect of the handler: the client gets a status, and the server goes on
        _logger.exception("a request failed")
        counters.refusals[grpc.StatusCode.INTERNAL.name] += 1
        end_with(context, grpc.StatusCode.INTERNAL, "the server failed while it computed; its log says why")


def add_service(service: BlocksService, server: grpc.aio.Server, counters: Counters | None = None) -> None:
    counters = counters or Counters()
    handlers = {method.name: _handler(service, method, counters) for method in BLOCKS.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BLOCKS.full_name, handlers),))


def _span(method: MethodDescriptor, context: _Context) -> AbstractContextManager[TraceSpan]:
    """Return the context in which a call is answered: a span, if the caller traces the request behind it."""
    if method.name not in _TRACED:
        return nullcontext(UNRECORDED)
    attributes = {"rpc.system": "grpc", "rpc.service": BLOCKS.full_name, "rpc.method": method.name}
    return tracing().call(f"{BLOCKS.full_name}/{method.name}", attributes, context.invocation_metadata() or ())


def _handler(service: BlocksService, method: MethodDescriptor, counters: Counters) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a method, which counts its calls, refusals and bytes."""
    answer = getattr(service, method.name)

    async def answer_one(requests: AsyncIterator[Any], context: _Context) -> Any:
        return await answer(await service.only_request(requests), context)

    async def answer_counted(requests: AsyncIterator[Any], context: _Context) -> Any:
        counters.calls[method.name] += 1
        with _span(method, context):
            return await (answer if method.client_streaming else answer_one)(requests, context)

    def note_sent(size_bytes: int) -> None:
        counters.sent_bytes["reply"] += size_bytes

    errors = partial(errors_as_status, counters=counters)
    return stream_handler(method, answer_counted, errors, counters.receive, note_sent)
