"""The interface between peers of a robust run and the network."""

from __future__ import annotations

from typing import Protocol

from swarm_training.pb import training_robust_pb2 as pb


class RobustNetwork(Protocol):
    """The calls to other peers. All raise PeerUnavailable if the peer cannot be reached, or is not known."""

    async def tell(self, peer_id: str, request: pb.TellRequest) -> None: ...

    async def fetch(self, peer_id: str, digest: bytes, max_bytes: int) -> bytes:
        """Return the data with this digest. Raise RequestRejected if the peer refuses, or sends too many bytes."""

    async def standings(self, peer_id: str) -> bytes:
        """Return an encoded ``Standings``. Raise the errors of ``fetch``."""


class RobustHandlers(Protocol):
    """The answers of a peer; ``peer_id`` is the id of the caller, which the network has authenticated."""

    async def tell(self, peer_id: str, request: pb.TellRequest) -> None: ...

    async def fetch(self, peer_id: str, digest: bytes) -> bytes: ...

    async def standings(self, peer_id: str) -> bytes: ...
