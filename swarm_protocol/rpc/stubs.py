"""The client side of gRPC services: stubs made of a service's descriptor, as the server side's handlers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm_protocol.pb import swarm_pb2 as pb

if TYPE_CHECKING:
    import grpc

BLOCKS = pb.DESCRIPTOR.services_by_name["Blocks"]


class ServiceStub:
    """A client of one service. It has a function for each method of the service, which begins a call."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, service: ServiceDescriptor, channel: grpc.aio.Channel) -> None:
        kinds = {False: "unary", True: "stream"}
        for method in service.methods:
            begin = getattr(channel, f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}")
            call = begin(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)
