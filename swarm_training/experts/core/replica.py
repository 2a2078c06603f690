"""The description of a replica, which is the state of an expert at another server, without its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_training.experts.core.cells import Cell, is_in
from swarm_training.experts.pb import experts_pb2 as pb

_DIGEST_BYTES = 32
_MAX_STEPS = 1 << 62


@dataclass(frozen=True)
class Replica:
    """The description of one replica."""

    cell: Cell
    num_steps: int  # the version: the number of optimizer steps that the expert had taken
    size_bytes: int
    digest: bytes  # the SHA-256 of the replica's bytes

    @classmethod
    def of(cls, cell: Cell, num_steps: int, data: bytes) -> Replica:
        return cls(cell, num_steps, len(data), hashlib.sha256(data).digest())

    @classmethod
    def from_proto(cls, message: pb.Replica, grid: Sequence[int]) -> Replica:
        """Parse a message. Raise ValueError if a value is out of range."""
        if not is_in(message.cell, grid):
            raise ValueError(f"a replica is of no cell of the grid {tuple(grid)}")
        if len(message.sha256) != _DIGEST_BYTES or not message.size_bytes or message.num_steps > _MAX_STEPS:
            raise ValueError("a replica has no SHA-256, no bytes, or a number of steps that nobody can have taken")
        return cls(tuple(message.cell), message.num_steps, message.size_bytes, message.sha256)

    def to_proto(self) -> pb.Replica:
        return pb.Replica(cell=self.cell, num_steps=self.num_steps, size_bytes=self.size_bytes, sha256=self.digest)

    def is_of(self, data: bytes) -> bool:
        return len(data) == self.size_bytes and hashlib.sha256(data).digest() == self.digest
