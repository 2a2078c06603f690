"""What is averaged in place of a gradient, in one or several phases."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from torch import Tensor

Phases = Generator[Tensor, Tensor, Tensor]


class Compressor(Protocol):
    def phases(self, gradient: Tensor) -> Phases:
        """Yields vectors to be averaged, [n] float32; is sent the mean of each; returns the averaged gradient.

        If the averaging fails, the generator is closed; the compressor must then be as it was before.
        """


class Encoder(Protocol):
    """Keeps, for each key, what encoding has lost, and adds it to the next vector of that key (error feedback)."""

    def encode(self, key: str, vector: Tensor) -> bytes: ...


class Plain:
    """The gradient as it is."""

    def phases(self, gradient: Tensor) -> Phases:
        return (yield gradient)
