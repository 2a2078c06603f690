"""Connects the service to a gRPC server, so that bytes which are no message are refused like any bad request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.parsing import parse
from swarm_server.rpc.service import BlocksService, errors_as_status

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
_Answer = Callable[[AsyncIterator[Any], "_Context"], Awaitable[Any]]
_SERVICE = pb.DESCRIPTOR.services_by_name["Blocks"]


def add_service(service: BlocksService, server: grpc.aio.Server) -> None:
    handlers = {method.name: _handler(service, method) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


def _handler(service: BlocksService, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    answer = getattr(service, method.name)
    read = partial(parse, GetMessageClass(method.input_type))
    write = GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(_closing_its_stream(answer), read, write)
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(_closing_its_stream(answer), read, write)

    async def of_one_message(requests: AsyncIterator[Any], context: _Context) -> Any:
        """gRPC itself would never answer a call whose message does not come, nor end it."""
        async with errors_as_status(context):
            return await answer(await service.only_request(requests), context)

    return grpc.stream_unary_rpc_method_handler(_closing_its_stream(of_one_message), read, write)


def _closing_its_stream(answer: _Answer) -> _Answer:
    """gRPC's own iterator is in a cycle of references, and keeps the last message until it is closed or collected."""

    async def answer_and_close(requests: AsyncIterator[Any], context: _Context) -> Any:
        generator = cast(AsyncGenerator[Any, None], aiter(requests))
        async with aclosing(generator) as messages:
            return await answer(messages, context)

    return answer_and_close
