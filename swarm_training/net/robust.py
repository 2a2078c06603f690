"""The gRPC service of a peer of a robust run, and its calls to other peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.errors import PeerUnavailable, RequestRejected
from swarm_protocol.rpc.channels import translated
from swarm_protocol.rpc.serving import admitted, errors_as_status
from swarm_protocol.wire.codec import parts_of
from swarm_training.core.record import Progress
from swarm_training.core.robust_network import RobustHandlers
from swarm_training.net.channels import GrpcNetwork
from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.pb.training_robust_pb2_grpc import (
    RobustTrainingServicer,
    RobustTrainingStub,
    add_RobustTrainingServicer_to_server,
)

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
_MAX_STANDINGS_BYTES = 1 << 24
_DIGEST_BYTES = 32


class GrpcRobustNetwork:
    """The calls to peers of a robust run, whose addresses are in their records."""

    def __init__(self, network: GrpcNetwork, record_of: Callable[[str], Progress | None]) -> None:
        """Use the channels of ``network``. ``record_of``: returns the newest record of a peer, by its id."""
        self._network = network
        self._record_of = record_of

    async def tell(self, peer_id: str, request: pb.TellRequest) -> None:
        stub = await self._stub(peer_id)
        async with translated():
            await stub.Tell(request)

    async def fetch(self, peer_id: str, digest: bytes, max_bytes: int) -> bytes:
        stub = await self._stub(peer_id)
        async with translated():
            return await _joined(stub.Fetch(pb.FetchRequest(digest=digest)), max_bytes)

    async def standings(self, peer_id: str) -> bytes:
        stub = await self._stub(peer_id)
        async with translated():
            return await _joined(stub.GetStandings(pb.StandingsRequest()), _MAX_STANDINGS_BYTES)

    async def _stub(self, peer_id: str) -> Any:
        record = self._record_of(peer_id)
        if record is None:
            raise PeerUnavailable("nothing is known of the peer's address", peer_id)
        return RobustTrainingStub(await self._network.channel(record))  # type: ignore[no-untyped-call]


async def _joined(call: Any, max_bytes: int) -> bytes:
    data = bytearray()
    try:
        async for part in call:
            data += part.data
            if len(data) > max_bytes:
                raise RequestRejected(f"a peer has sent more than {max_bytes} bytes")
    finally:
        call.cancel()
    return bytes(data)


class RobustTrainingService(RobustTrainingServicer):
    def __init__(self, handlers: RobustHandlers, access: AccessControl | None) -> None:
        """Serve ``handlers``. ``access``: the access control of a private run; None: any peer may take part."""
        self._handlers = handlers
        self._access = access

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that has not started."""
        add_RobustTrainingServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def Tell(self, request: pb.TellRequest, context: _Context) -> pb.TellReply:
        async with errors_as_status(context):
            await self._handlers.tell(admitted(context, self._access), request)
        return pb.TellReply()

    async def Fetch(self, request: pb.FetchRequest, context: _Context) -> None:
        async with errors_as_status(context):
            if len(request.digest) != _DIGEST_BYTES:
                raise RequestRejected("data is requested by the 32 bytes of its SHA-256")
            data = await self._handlers.fetch(admitted(context, self._access), request.digest)
            for part in parts_of(data):
                await context.write(pb.FetchReply(data=part))

    async def GetStandings(self, _: object, context: _Context) -> None:
        async with errors_as_status(context):
            for part in parts_of(await self._handlers.standings(admitted(context, self._access))):
                await context.write(pb.StandingsPart(data=part))
