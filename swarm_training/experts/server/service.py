"""The gRPC service of a server of experts: it authenticates callers, and passes requests to handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.tokens import Role
from swarm_protocol.net.tls import Certificate
from swarm_protocol.rpc.serving import add_service, admitted, start_server
from swarm_training.experts.pb import experts_pb2 as pb
from swarm_training.experts.replicas.keeper import Keeper
from swarm_training.experts.server.host import ExpertHost

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
_SERVICE = pb.DESCRIPTOR.services_by_name["Experts"]


class ExpertsService:
    """The service of one server of experts."""

    def __init__(self, handlers: ExpertHost, replicas: Keeper, access: AccessControl | None) -> None:
        """Create the service; ``access`` is the access control of a private swarm, or None if everybody may call."""
        self._handlers = handlers
        self._replicas = replicas
        self._access = access

    async def Forward(self, request: pb.ForwardRequest, context: _Context) -> pb.ForwardReply:
        return await self._handlers.forward(admitted(context, self._access, Role.CLIENT), request)

    async def Backward(self, request: pb.BackwardRequest, context: _Context) -> pb.BackwardReply:
        return await self._handlers.backward(admitted(context, self._access, Role.TRAINER), request)

    async def KeepReplica(
        self, requests: AsyncIterator[pb.KeepReplicaRequest], context: _Context
    ) -> pb.KeepReplicaReply:
        return await self._replicas.keep(admitted(context, self._access, Role.SERVER), requests)

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: _Context) -> pb.ListReplicasReply:
        admitted(context, self._access, Role.SERVER)
        return await self._replicas.listed(request)

    async def FetchReplica(self, request: pb.FetchReplicaRequest, context: _Context) -> None:
        admitted(context, self._access, Role.SERVER)
        async for part in self._replicas.fetch(request):
            await context.write(part)


async def start_service(
    handlers: ExpertHost,
    replicas: Keeper,
    certificate: Certificate,
    host: str,
    port: int,
    access: AccessControl | None,
) -> tuple[grpc.aio.Server, int]:
    """Return a server that listens, and its port. Raise ValueError if the server cannot listen at the address."""
    service = ExpertsService(handlers, replicas, access)
    return await start_server(partial(add_service, service, _SERVICE), certificate, host, port)
