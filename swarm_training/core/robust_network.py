"""The seam between peers of a robust run and the network."""

from __future__ import annotations

from typing import Protocol

from swarm_training.pb import training_robust_pb2 as pb


class RobustNetwork(Protocol):
    """Calls of peers. All raise PeerUnavailable if the peer cannot be reached, or is not known."""

    async def tell(self, peer_id: str, request: pb.TellRequest) -> None: ...

    async def fetch(self, peer_id: str, digest: bytes, max_bytes: int) -> bytes:
        """Raises RequestRejected if the peer does not give it, or has sent more than that."""

    async def standings(self, peer_id: str) -> bytes:
        """A ``Standings``. Raises as ``fetch`` does."""


class RobustHandlers(Protocol):
    """What a peer answers; ``peer_id`` is that of the caller, whom the network has authenticated."""

    async def tell(self, peer_id: str, request: pb.TellRequest) -> None: ...

    async def fetch(self, peer_id: str, digest: bytes) -> bytes: ...

    async def standings(self, peer_id: str) -> bytes: ...
