"""Transfer of replicas between servers, in parts; both sides check the data that arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from swarm_protocol.errors import BadReply, PeerUnavailable, RequestRejected
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.rpc.channels import translated
from swarm_protocol.wire.codec import parts_of
from swarm_protocol.wire.constants import MIB
from swarm_protocol.wire.status import FirstStatus
from swarm_training.experts.core.cells import Cell
from swarm_training.experts.core.replica import Replica
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.net.calls import ServerCalls
from swarm_training.experts.pb import experts_pb2 as pb

_ANSWER_S = 10.0
_Part = pb.KeepReplicaRequest | pb.FetchReplicaReply


def most_seconds(size_bytes: int) -> float:
    """Return the longest time that a replica may take to arrive; less than 1 MiB/s is too slow."""
    return _ANSWER_S + size_bytes / MIB


async def received(replica: Replica, first: _Part, parts: AsyncIterator[_Part], timeout_s: float) -> bytes:
    """Return the bytes of a replica whose first part has come; memory is reserved only for what has arrived. Raise
    RequestRejected if the bytes are not those of the description, or TimeoutError if they do not come in time."""
    came = [first.data]
    size_bytes = len(first.data)
    async with asyncio.timeout(timeout_s):
        async for part in parts:
            came.append(part.data)
            size_bytes += len(part.data)
            if size_bytes > replica.size_bytes:
                break
    data = await asyncio.to_thread(b"".join, came)
    if not await asyncio.to_thread(replica.is_of, data):
        raise RequestRejected(f"the bytes of a replica are not the {replica.size_bytes} bytes with its SHA-256")
    return data


class ReplicaCalls(ServerCalls):
    """The calls for replicas, which raise SwarmError."""

    def __init__(self, credentials: ClientCredentials, name: str, grid: Sequence[int]) -> None:
        super().__init__(credentials)
        self._name = name
        self._grid = grid

    async def send(self, keeper: ExpertHolder, replica: Replica, data: bytes) -> None:
        """Send a replica, and return when the keeper has it."""

        def requests() -> Iterator[pb.KeepReplicaRequest]:
            yield pb.KeepReplicaRequest(name=self._name, replica=replica.to_proto())
            for part in parts_of(data):
                yield pb.KeepReplicaRequest(data=part)

        stub = await self._stub(keeper)
        call = stub.KeepReplica(requests(), timeout=most_seconds(len(data)))
        async with translated(keeper.peer_id, FirstStatus(call)):
            await call

    async def listed(self, keeper: ExpertHolder) -> list[Replica]:
        """Return the descriptions of the keeper's replicas."""
        stub = await self._stub(keeper)
        async with translated(keeper.peer_id):
            reply = await stub.ListReplicas(pb.ListReplicasRequest(name=self._name), timeout=_ANSWER_S)
        try:
            return [Replica.from_proto(message, self._grid) for message in reply.replicas]
        except ValueError as error:
            raise BadReply(str(error), keeper.peer_id) from None

    async def fetch(self, keeper: ExpertHolder, cell: Cell, most_bytes: int) -> tuple[Replica, bytes]:
        """Return the replica of a cell, which may be newer than the listed one."""
        stub = await self._stub(keeper)
        call = stub.FetchReplica(pb.FetchReplicaRequest(name=self._name, cell=cell), timeout=most_seconds(most_bytes))
        try:
            async with translated(keeper.peer_id):
                parts = aiter(call)
                first = await anext(parts, None)
                if first is None:
                    raise BadReply("the answer of a keeper has no replica", keeper.peer_id)
                replica = Replica.from_proto(first.replica, self._grid)
                if replica.cell != cell or replica.size_bytes > most_bytes:
                    raise BadReply("a keeper has sent another replica, or a larger one than expected", keeper.peer_id)
                return replica, await received(replica, first, parts, most_seconds(most_bytes))
        except TimeoutError:
            raise PeerUnavailable("a replica does not arrive in time", keeper.peer_id) from None
        except ValueError as error:
            raise BadReply(str(error), keeper.peer_id) from None
        finally:
            call.cancel()
