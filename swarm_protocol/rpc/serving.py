"""The server side of gRPC: it listens, authenticates and authorises callers, refuses bytes that are no message, and
reports errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.tokens import Role
from swarm_protocol.errors import RequestRejected, SwarmError
from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.tls import Certificate, peer_of, token_of
from swarm_protocol.wire.constants import SERVER_OPTIONS
from swarm_protocol.wire.parsing import parse
from swarm_protocol.wire.printable import printable
from swarm_protocol.wire.status import end_with, status_of

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
_ONLY_MESSAGE_S = 60.0  # the wait for the message of a call that has one
_logger = logging.getLogger(__name__)


def admitted(context: _Context, access: AccessControl | None, role: Role = Role.TRAINER) -> str:
    """Return the caller's peer id; ``access`` is that of a private swarm.

    Raises:
        AccessDenied: the caller has shown no certificate, or may not act in this role.
    """
    auth = context.auth_context()
    peer_id = peer_of(auth)
    if access is not None:
        access.require(role, peer_id, token_of(auth))
    return peer_id


@asynccontextmanager
async def errors_as_status(context: _Context) -> AsyncIterator[None]:
    """End the call with a status if the context raises; the handler must return afterwards, see ``end_with``."""
    try:
        yield
    except SwarmError as error:
        end_with(context, status_of(error), printable(str(error)))
    except TimeoutError:
        end_with(context, grpc.StatusCode.DEADLINE_EXCEEDED, "this peer has waited too long")
    except ValueError as error:
        end_with(context, status_of(RequestRejected("")), printable(str(error)))
    except grpc.aio.BaseError as error:
        _logger.debug("a caller went away: %s", error)


def add_service(service: object, descriptor: ServiceDescriptor, server: grpc.aio.Server) -> None:
    """Add a service to a server that has not started. What its methods raise is answered as ``errors_as_status`` says.

    ``service``: an object with a method for each of the descriptor's, with the signature of a generated servicer's.
    """
    handlers = {method.name: stream_handler(method, _streaming(service, method)) for method in descriptor.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(descriptor.full_name, handlers),))


def stream_handler(
    method: MethodDescriptor,
    answer: Callable[[AsyncIterator[Any], _Context], Awaitable[Any]],
    errors: Callable[[_Context], AbstractAsyncContextManager[None]] = errors_as_status,
    note_received: Callable[[int], None] | None = None,
    note_sent: Callable[[int], None] | None = None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a stream handler for any method; a stream of one message looks the same on the wire as a single message.

    A gRPC handler for a single message would answer bytes that are no message with a traceback, and would neither
    answer nor end a call whose message never comes.

    Args:
        answer: returns the reply to the messages of a call; None if it has written its replies itself, or refused.
        errors: returns a context that ends a call with a status; bytes that are no message raise RequestRejected in it.
        note_received, note_sent: are called with the size of each message in bytes.
    """
    parse_input = partial(parse, GetMessageClass(method.input_type))
    serialise = GetMessageClass(method.output_type).SerializeToString

    async def answer_all(requests: AsyncIterator[Any], context: _Context) -> None:
        generator = cast(AsyncGenerator[Any, None], aiter(requests))
        # The generator is in a reference cycle, and keeps the last message alive until it is closed or collected.
        async with errors(context), aclosing(generator) as messages:
            reply = await answer(messages, context)
            if reply is not None:
                await context.write(reply)

    def read(data: bytes) -> Any:
        if note_received is not None:
            note_received(len(data))
        return parse_input(data)

    def write(message: Any) -> bytes:
        data: bytes = serialise(message)
        if note_sent is not None:
            note_sent(len(data))
        return data

    return grpc.stream_stream_rpc_method_handler(answer_all, read, write)


def _streaming(service: object, method: MethodDescriptor) -> Callable[[AsyncIterator[Any], _Context], Awaitable[Any]]:
    """Return the service's method as one that receives a stream of messages."""
    answer: Callable[[Any, _Context], Awaitable[Any]] = getattr(service, method.name)
    if method.client_streaming:
        return answer

    async def answer_one(requests: AsyncIterator[Any], context: _Context) -> Any:
        async with asyncio.timeout(_ONLY_MESSAGE_S):
            request = await anext(requests, None)
        if request is None:
            raise RequestRejected("a call came without its message")
        return await answer(request, context)

    return answer_one


async def start_server(
    add_services: Callable[[grpc.aio.Server], None], certificate: Certificate, host: str, port: int
) -> tuple[grpc.aio.Server, int]:
    """Start a server, and return it with its port; ``add_services`` receives the server before it starts.

    Raises:
        ValueError: the server cannot listen on the address.
    """
    server, bound = bound_server(certificate, host, port)
    add_services(server)
    await server.start()
    return server, bound


def bound_server(certificate: Certificate, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Return a server that has not started, and its port; port 0 stands for any free port.

    Raises:
        ValueError: the server cannot listen on the address.
    """
    server, bound = grpc.aio.server(options=SERVER_OPTIONS), 0
    with suppress(RuntimeError):  # some versions of gRPC raise, others return 0
        bound = server.add_secure_port(host_port(host, port), certificate.server_credentials())
    if bound == 0:
        raise ValueError(cannot_listen(host, port))
    return server, bound


def cannot_listen(host: str, port: int) -> str:
    return f"cannot listen on {host_port(host, port)}: the port is in use or the address is not this machine's"
