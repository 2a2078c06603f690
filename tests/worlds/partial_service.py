"""Servers of the service Blocks that answer some of its methods, written without the checks of a real server."""

from __future__ import annotations

import grpc
from google.protobuf.message_factory import GetMessageClass

from swarm_protocol.rpc.stubs import BLOCKS


def serve_methods(service: object, server: grpc.aio.Server) -> None:
    """Add the methods that the object has to a server that has not started; gRPC refuses calls of the others."""
    handlers, kinds = {}, {False: "unary", True: "stream"}
    for method in BLOCKS.methods:
        if answer := getattr(service, method.name, None):
            kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
            parse = GetMessageClass(method.input_type).FromString
            serialise = GetMessageClass(method.output_type).SerializeToString
            handlers[method.name] = getattr(grpc, f"{kind}_rpc_method_handler")(answer, parse, serialise)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BLOCKS.full_name, handlers),))
