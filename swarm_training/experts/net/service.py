"""The gRPC service of a server of experts: it authenticates callers, and passes requests to handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.tokens import Role
from swarm_protocol.net.tls import Certificate
from swarm_protocol.rpc.serving import add_service, admitted, start_server
from swarm_training.experts.pb import experts_pb2 as pb

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
_SERVICE = pb.DESCRIPTOR.services_by_name["Experts"]


class ExpertHandlers(Protocol):
    """The handlers of calls to experts. Both raise SwarmError; the first argument is the caller's peer id."""

    async def forward(self, caller: str, request: pb.ForwardRequest) -> pb.ForwardReply: ...

    async def backward(self, caller: str, request: pb.BackwardRequest) -> pb.BackwardReply: ...


class ReplicaHandlers(Protocol):
    """The handlers for replicas, see ``Keeper``. They raise SwarmError; ``keep`` also ValueError and TimeoutError."""

    async def keep(self, caller: str, requests: AsyncIterator[pb.KeepReplicaRequest]) -> pb.KeepReplicaReply: ...

    async def listed(self, request: pb.ListReplicasRequest) -> pb.ListReplicasReply: ...

    def fetch(self, request: pb.FetchReplicaRequest) -> AsyncIterator[pb.FetchReplicaReply]: ...


class ExpertsService:
    def __init__(self, handlers: ExpertHandlers, replicas: ReplicaHandlers, access: AccessControl | None) -> None:
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
    handlers: ExpertHandlers,
    replicas: ReplicaHandlers,
    certificate: Certificate,
    host: str,
    port: int,
    access: AccessControl | None,
) -> tuple[grpc.aio.Server, int]:
    """Return a server that listens, and its port.

    Raises:
        ValueError: the server cannot listen at the address.
    """
    service = ExpertsService(handlers, replicas, access)
    return await start_server(partial(add_service, service, _SERVICE), certificate, host, port)
