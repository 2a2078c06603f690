"""The ways that micro-batches took through servers, which the backward pass goes back."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_client.routing.routing import Hop
from swarm_client.transport.wire_tensor import Context, WireTensor


@dataclass(frozen=True)
class Visited:
    """A server that some rows went to.

    Attributes:
        hidden: with which they entered its blocks.
        kept_key: under which it keeps what the backward pass needs; empty if it does not.
    """

    hop: Hop
    hidden: WireTensor
    kept_key: bytes = b""


@dataclass(frozen=True)
class Way:
    """How one micro-batch went through the blocks, and what accompanied it."""

    context: Context
    path: list[Visited]

    @property
    def num_rows(self) -> int:
        return self.path[0].hidden.header.shape[0]
