"""What is averaged in place of a gradient, in one or several phases."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from typing import Protocol

from torch import Tensor

Phases = Generator[Tensor, Tensor, Tensor]


class Compressor(Protocol):
    def phases(self, gradient: Tensor) -> Phases:
        """Yields vectors to be averaged, [n] float32; is sent the mean of each; returns the averaged gradient.

        If the averaging fails, the generator is closed; the compressor must then be as it was before.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """What is the same on all peers, and who joins must have."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError if it is not that of such a compressor."""


class Encoder(Protocol):
    """Keeps, for each key, what encoding has lost, and adds it to the next vector of that key (error feedback)."""

    def encode(self, key: Hashable, vector: Tensor) -> bytes: ...

    def commit(self) -> None:
        """The step was taken."""

    def rollback(self) -> None:
        """The averaging has failed."""


class Plain:
    """The gradient as it is."""

    def phases(self, gradient: Tensor) -> Phases:
        return (yield gradient)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ValueError("the run compresses gradients, and this peer does not: expected the same compressor")
