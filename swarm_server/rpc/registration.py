"""Connects the service to a gRPC server, so that bytes which are no message are refused like any bad request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.parsing import parse
from swarm_server.rpc.service import BlocksService, errors_as_status

_SERVICE = pb.DESCRIPTOR.services_by_name["Blocks"]


def add_service(service: BlocksService, server: grpc.aio.Server) -> None:
    handlers = {method.name: _handler(service, method) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


def _handler(service: BlocksService, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    answer = getattr(service, method.name)
    read = partial(parse, GetMessageClass(method.input_type))
    write = GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(answer, read, write)
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(answer, read, write)

    async def of_one_message(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """gRPC itself would never answer a call whose message does not come, nor end it."""
        async with errors_as_status(context):
            return await answer(await service.only_request(requests), context)

    return grpc.stream_unary_rpc_method_handler(of_one_message, read, write)
