"""The ways that micro-batches took through servers, for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_client.routing.routing import Hop
from swarm_client.transport.wire_tensor import Context, WireTensor


@dataclass(frozen=True)
class Visited:
    """One server on the way of some rows, with what its backward pass needs.

    Attributes:
        hidden: the hidden states with which the rows entered the server's blocks.
        kept_key: the key under which the server keeps what the backward pass needs; empty if it keeps nothing.
    """

    hop: Hop
    hidden: WireTensor
    kept_key: bytes = b""


@dataclass(frozen=True)
class Way:
    """The way of one micro-batch through the blocks, with the context of its requests.

    Attributes:
        positions: the positions of the batch that were sent; the others are padding in all rows.
    """

    context: Context
    path: list[Visited]
    positions: slice

    @property
    def num_rows(self) -> int:
        return self.path[0].hidden.header.shape[0]
