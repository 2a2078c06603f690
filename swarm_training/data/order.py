"""The order of samples: functions of the run's name and of numbers that every peer knows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from swarm_training.data.permutation import Indices, Permutation


@dataclass(frozen=True)
class SampleOrder:
    """An endless series of samples: positions 0..num_samples−1 are the first epoch, and each epoch has its own order.
    ``seed``: the text from which the orders follow, such as the run's name; other seeds give other orders."""

    seed: str
    num_samples: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("the data set has no samples: expected at least one")

    def samples(self, positions: Indices) -> Indices:
        """Return the samples at these positions, each ≥ 0; [n] → [n]."""
        epochs, places = np.divmod(positions, self.num_samples)
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = derived_seed(self.seed, "epoch", int(epoch)).encode()
            found[chosen] = Permutation(self.num_samples, key).at(places[chosen])
        return found


def derived_seed(*parts: str | int) -> str:
    """Return a different seed for each sequence of parts; the borders between the parts matter too."""
    message = b"".join(b"%d:" % len(part) + part for part in (str(part).encode() for part in parts))
    return hashlib.sha256(message).hexdigest()


def batch_of_step(order: SampleOrder, step: int, batch_size: int, first: int, count: int) -> Indices:
    """Return samples ``first``..``first + count − 1`` of a step's batch, which peers divide among themselves.

    Batches of successive steps follow one another in the order: no sample comes twice in an epoch.
    """
    if not 0 <= first <= first + count <= batch_size:
        raise ValueError(f"samples {first}:{first + count} of a batch of {batch_size}: expected some of 0:{batch_size}")
    start = step * batch_size + first
    return order.samples(np.arange(start, start + count))


@dataclass(frozen=True)
class DataShard:
    """The part of an order that one of ``count`` peers takes: positions ``index``, ``index + count``, ….

    Together the parts take every position once. ``EVERYTHING`` is the whole order as its only part.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"part {self.index} of {self.count}: expected a part of 0 to {self.count - 1}")

    def positions(self, start: int, count: int) -> Indices:
        """Return the positions of the part's samples ``start``..``start + count − 1``, [count]."""
        return self.index + self.count * np.arange(start, start + count)


EVERYTHING = DataShard(0, 1)


class PartCursor:
    """The progress of a peer in its part: the number of samples taken."""

    def __init__(self, order: SampleOrder, part: DataShard = EVERYTHING) -> None:
        self.order = order
        self.part = part
        self.taken = 0

    def take(self, count: int) -> Indices:
        samples = self.order.samples(self.part.positions(self.taken, count))
        self.taken += count
        return samples

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken, "part": self.part.index, "parts": self.part.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load a state. Raise ValueError if it belongs to another part."""
        if (state["part"], state["parts"]) != (self.part.index, self.part.count):
            raise ValueError(
                f"the state is that of part {state['part']} of {state['parts']}: expected part {self.part.index} "
                f"of {self.part.count}"
            )
        self.taken = state["taken"]
