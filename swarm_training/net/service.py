"""The gRPC service of a peer, which authenticates callers and passes their requests to the handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.tokens import Role
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.rpc.serving import add_service, admitted
from swarm_training.core.network import PeerHandlers
from swarm_training.pb import training_pb2 as pb

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
Out = TypeVar("Out")
In = TypeVar("In")


class _ServedStream(Generic[Out, In]):
    """The called peer's side of a stream."""

    def __init__(self, context: _Context) -> None:
        self._context = context

    async def send(self, message: Out) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise PeerUnavailable(f"the caller is gone: {error}") from None

    async def receive(self) -> In | None:
        try:
            message = await self._context.read()
        except grpc.aio.BaseError as error:
            raise PeerUnavailable(f"the caller is gone: {error}") from None
        if message is grpc.aio.EOF:
            if self._context.cancelled():
                raise PeerUnavailable("the caller is gone")
            return None
        received: In = message
        return received

    async def finish(self) -> None:
        """Do nothing, because the stream ends when its handler returns."""


class TrainingService:
    """The gRPC service ``Training`` of one peer."""

    def __init__(self, handlers: PeerHandlers, access: AccessControl | None) -> None:
        """Serve ``handlers``. ``access``: the access control of a private run; None: any peer may take part."""
        self._handlers = handlers
        self._access = access

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that has not started."""
        add_service(self, pb.DESCRIPTOR.services_by_name["Training"], server)

    async def Exchange(self, request: pb.ExchangeRequest, context: _Context) -> pb.ExchangeReply:
        peer_id = admitted(context, self._access)
        return await self._handlers.exchange(peer_id, request)

    async def Meet(self, _: object, context: _Context) -> None:
        peer_id = admitted(context, self._access)
        await self._handlers.meet(peer_id, _ServedStream(context))

    async def Reduce(self, _: object, context: _Context) -> None:
        peer_id = admitted(context, self._access)
        await self._handlers.reduce(peer_id, _ServedStream(context))

    async def Fetch(self, request: pb.FetchRequest, context: _Context) -> None:
        peer_id = admitted(context, self._access)
        async for chunk in self._handlers.fetch(peer_id, request):
            await context.write(chunk)

    async def State(self, request: pb.StateRequest, context: _Context) -> None:
        peer_id = admitted(context, self._access)
        async for part in self._handlers.state(peer_id, request):
            await context.write(part)

    async def Rounds(self, request: pb.RoundsRequest, context: _Context) -> pb.RoundsReply:
        peer_id = admitted(context, self._access, Role.CLIENT)  # any member may sum up contributions, trainers or not
        return await self._handlers.rounds(peer_id, request)
