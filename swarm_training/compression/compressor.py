"""Which vectors a group averages in order to average a gradient."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from typing import Protocol

from torch import Tensor

Phases = Generator[Tensor, Tensor, Tensor]  # yields vectors to be averaged, is sent their means, returns the gradient


class Compressor(Protocol):
    """Turns averaging one gradient into averaging one or several vectors.

    State that follows from means alone is the same on all peers; it changes when the generator returns, and not if it
    is closed before, so that a round that failed can be repeated.
    """

    def phases(self, gradient: Tensor) -> Phases:
        """gradient: [n], float32. Yields flat float32 vectors, is sent their means over the group, returns the averaged
        gradient [n], bit-identical wherever the means are."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a peer that joins must have: the part of the state that is the same on all peers."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError if it is not of such a compressor."""


class Encoder(Protocol):
    """Remembers, for each key, what encoding has lost, once the round it was lost in is committed."""

    def encode(self, key: Hashable, vector: Tensor) -> bytes:
        """vector: [n], float32."""

    def commit(self) -> None:
        """The round succeeded."""

    def rollback(self) -> None:
        """The round failed."""

    def forget(self) -> None:
        """Another state has been taken over, and what was lost belongs to the old one."""


class Plain:
    """The gradient itself is averaged."""

    def phases(self, gradient: Tensor) -> Phases:
        return (yield gradient)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ValueError(f"uncompressed gradients have no state, but got {', '.join(state)}")
