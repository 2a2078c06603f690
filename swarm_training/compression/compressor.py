"""Compressors, which decide which vectors a group averages in order to average a gradient."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Protocol

from torch import Tensor

Phases = Generator[Tensor, Tensor, Tensor]  # yields vectors to average, receives their means, returns the gradient


class Compressor(Protocol):
    """A method to average one gradient by averaging one or several vectors.

    The state that follows from means alone is the same on all peers. It changes only when the generator of ``phases``
    returns, so that a round that has failed, and has closed the generator, can be repeated.
    """

    def phases(self, gradient: Tensor) -> Phases:
        """Yield flat float32 vectors for a gradient, [n] float32, and receive their means over the group. Return the
        averaged gradient, [n] float32, which is bit-identical wherever the means are."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a joining peer needs: the part that is the same on all peers."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state. Raise ValueError if it is not the state of such a compressor."""


class Plain:
    """A compressor that averages the gradient itself."""

    def phases(self, gradient: Tensor) -> Phases:
        return (yield gradient)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ValueError(f"uncompressed gradients have no state, but got {', '.join(state)}")
