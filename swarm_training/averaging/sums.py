"""What the owner of a chunk makes of its members' parts: the weighted mean, the mean over all micro-batches of a batch,
or CenteredClip if some may cheat."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from swarm_training.robust.centered_clip import centered_clip

_MOST_WEIGHT = 2.0  # times the median: so 3 of 10 weigh less than the others, whatever they say of their samples


class ChunkSum:
    """Adds the members' parts in the order of the members, whatever order they arrive in: sums of floats depend on it.

    Attributes:
        weight: of what has been added: of all, once ``mean`` has been asked for.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        """``weights``: of the members that have something to add, all above 0."""
        self._weights = weights
        self._waiting = sorted(weights)  # in whose order is added
        self._early: dict[int, tuple[Tensor, float]] = {}
        self._left_out: set[int] = set()
        self._total: Tensor | None = None
        self._mean: Tensor | None = None
        self.weight = 0.0

    @property
    def is_done(self) -> bool:
        return not self.missing

    @property
    def mean(self) -> Tensor | None:
        """[n] float32, once all have arrived or are left out; None before, and if nothing has arrived."""
        if self._mean is None and self.is_done:
            self._advance()
            self._mean = None if self._total is None else self._total / self.weight
            self._total = None
        return self._mean

    @property
    def missing(self) -> frozenset[int]:
        return frozenset(self._waiting) - self._early.keys() - self._left_out

    def put(self, member: int, part: Tensor, weight: float | None = None) -> None:
        """Ignored if the part of this member is not waited for (any more). ``weight``: if it is less than expected."""
        if member in self.missing:
            self._early[member] = part, self._weights[member] if weight is None else weight
            self._advance()

    def leave_out(self, member: int) -> None:
        """Nothing comes from this member any more. What waits for it is added up when the mean is asked for: a member
        may leave many sums at once."""
        if member in self.missing:
            self._left_out.add(member)

    def _advance(self) -> None:
        while self._waiting and (self._waiting[0] in self._early or self._waiting[0] in self._left_out):
            member = self._waiting.pop(0)
            if member not in self._early:
                continue
            part, weight = self._early.pop(member)
            weighted = part * weight
            self._total = weighted if self._total is None else self._total.add_(weighted)
            self.weight += weight


class ExactSum:
    """Adds sums of gradients in the order of the members, and divides by the number of micro-batches in the batch.

    Every part is needed: without one of them, micro-batches are missing, and there is no mean.

    Attributes:
        mean: [n] in the parts' type, once all have arrived.
    """

    def __init__(self, members: Collection[int], num_micro_batches: int) -> None:
        """``members``: those that have something to add."""
        self._waiting = sorted(members)  # in whose order is added
        self._num_micro_batches = num_micro_batches
        self._early: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._is_lost = False
        self.mean: Tensor | None = None

    @property
    def is_done(self) -> bool:
        return self._is_lost or not self._waiting

    @property
    def missing(self) -> frozenset[int]:
        return frozenset() if self._is_lost else frozenset(self._waiting) - self._early.keys()

    def put(self, member: int, part: Tensor) -> None:
        """Ignored if the part of this member is not waited for (any more)."""
        if member not in self.missing:
            return
        self._early[member] = part
        while self._waiting and self._waiting[0] in self._early:
            part = self._early.pop(self._waiting.pop(0))
            self._total = part.clone() if self._total is None else self._total.add_(part)
        if not self._waiting and self._total is not None:
            self.mean, self._total = self._total.div_(self._num_micro_batches), None

    def leave_out(self, member: int) -> None:
        """Nothing comes from this member any more."""
        if member in self.missing:
            self._is_lost = True
            self._early.clear()
            self._total = None


class ChunkClip:
    """Keeps the members' parts until all are there. All chunks of an owner take as much memory as the vector, at most.

    What a member says of its samples counts up to twice the median. Parts that are not finite do not count.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        """``weights``: of the members that have something to add, all above 0."""
        self._weights = weights
        self._left_out: set[int] = set()
        self._parts: dict[int, Tensor] = {}

    @property
    def is_done(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> frozenset[int]:
        return frozenset(self._weights) - self._parts.keys() - self._left_out

    def put(self, member: int, part: Tensor) -> None:
        """Ignored if the part of this member is not waited for (any more)."""
        if member in self.missing:
            self._parts[member] = part

    def leave_out(self, member: int) -> None:
        """Nothing comes from this member any more."""
        if member in self.missing:
            self._left_out.add(member)

    def clipped(self) -> Tensor | None:
        """[n] float32, of the parts in the order of the members; None if there are none. Takes long, and lets go of
        the parts."""
        parts, self._parts = self._parts, {}
        finite = [member for member in sorted(parts) if bool(parts[member].isfinite().all())]
        if not finite:
            return None
        stacked = torch.stack([parts.pop(member) for member in finite])
        return clipped_mean(stacked, capped([self._weights[member] for member in finite]))


def capped(weights: list[float]) -> Tensor:
    """None of them more than twice the median."""
    most = _MOST_WEIGHT * statistics.median_low(weights)
    return torch.tensor([min(weight, most) for weight in weights])


def clipped_mean(parts: Tensor, weights: Tensor) -> Tensor:
    """CenteredClip of parts [members, n] that are finite, where tau is their median distance to the median of every
    coordinate.

    That point depends on this step alone, so that any owner of a chunk can compute it, a new one as well, and while
    most members are honest it is among their parts. Distances to the last step's aggregate, as in BTARD, would need a
    state which those lack who have just joined.
    """
    centre = (parts.median(0).values.double() - (-parts).median(0).values.double()) / 2  # lower and upper median
    tau = statistics.median(float((part.double() - centre).norm()) for part in parts)
    return centered_clip(parts, weights, tau, start=centre) if tau > 0 else centre.float()
