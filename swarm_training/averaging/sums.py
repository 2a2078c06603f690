"""The three ways in which a chunk's owner combines the members' parts: the weighted mean, the mean over all
micro-batches of a batch, and CenteredClip if some members may cheat."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from swarm_training.numerics.centered_clip import centered_clip

_MOST_WEIGHT = 2.0  # times the median: 3 of 10 members weigh less than the others, whatever samples they claim


class _AwaitedParts:
    """The parts of a chunk that its owner waits for."""

    def __init__(self, members: Collection[int]) -> None:
        self.missing = set(members)  # the members whose parts are still expected
        self.counted: set[int] = set()  # the members whose parts are in the sum

    @property
    def is_done(self) -> bool:
        return not self.missing

    def leave_out(self, member: int) -> None:
        """Stop waiting for this member."""
        self.missing.discard(member)

    def _counts(self, member: int) -> bool:
        """Return whether the part of this member, which has arrived, is expected. If so, count the member."""
        if member not in self.missing:
            return False
        self.missing.remove(member)
        self.counted.add(member)
        return True


class ChunkSum(_AwaitedParts):
    """The weighted mean of the members' parts, added in the order of the members: sums of floats depend on the order.

    A straggler may leave many sums at once. Parts that have waited for its turn are added only when the mean is read,
    so that the event loop is not blocked by all of these sums.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        """Wait for the members in ``weights``; their weights are all above 0."""
        super().__init__(weights)
        self._weights = weights
        self._waiting = sorted(weights)  # parts are added in this order
        self._early: dict[int, tuple[Tensor, float]] = {}
        self._total: Tensor | None = None
        self._mean: Tensor | None = None
        self.weight = 0.0  # the total weight of the added parts; it is final once ``mean`` has been read

    @property
    def mean(self) -> Tensor | None:
        """Return the mean, [n] float32, once all parts have arrived or are left out; None before, or without parts."""
        if self._mean is None and self.is_done:
            self._advance()
            self._mean = None if self._total is None else self._total / self.weight
            self._total = None
        return self._mean

    def put(self, member: int, part: Tensor, weight: float | None = None) -> None:
        """Take a member's part, if it is still expected. ``weight``: given if it is less than expected."""
        if self._counts(member):
            self._early[member] = part, self._weights[member] if weight is None else weight
            self._advance()

    def _advance(self) -> None:
        while self._waiting and self._waiting[0] not in self.missing:
            member = self._waiting.pop(0)
            if member not in self._early:
                continue
            part, weight = self._early.pop(member)
            weighted = part * weight
            self._total = weighted if self._total is None else self._total.add_(weighted)
            self.weight += weight


class ExactSum(_AwaitedParts):
    """The sum of the members' gradient sums, in the members' order, divided by the number of micro-batches.

    Every part is needed: without one of them, micro-batches are missing, and there is no mean.
    """

    def __init__(self, members: Collection[int], num_micro_batches: int) -> None:
        """Wait for the parts of ``members``."""
        super().__init__(members)
        self._waiting = sorted(members)  # parts are added in this order
        self._num_micro_batches = num_micro_batches
        self._early: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self.mean: Tensor | None = None  # the mean, [n] in the parts' type, once all parts have arrived

    def put(self, member: int, part: Tensor) -> None:
        """Take a member's part, if it is still expected."""
        if not self._counts(member):
            return
        self._early[member] = part
        while self._waiting and self._waiting[0] in self._early:
            part = self._early.pop(self._waiting.pop(0))
            # A clone, because this peer's own part is a view of its vector.
            self._total = part.clone() if self._total is None else self._total.add_(part)
        if not self._waiting and self._total is not None:
            self.mean, self._total = self._total.div_(self._num_micro_batches), None

    def leave_out(self, member: int) -> None:
        """Give up the mean, unless the member's part has arrived."""
        if member in self.missing:
            self.missing.clear()
            self._early.clear()
            self._total = None


class ChunkClip(_AwaitedParts):
    """The clipped mean of the members' parts, which are kept until all have arrived. If all members have equal shares,
    the chunks of an owner together take as much memory as the vector.

    The samples that a member claims count up to twice the median. Parts that are not finite do not count.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        """Wait for the members in ``weights``; their weights are all above 0."""
        super().__init__(weights)
        self._weights = weights
        self._parts: dict[int, Tensor] = {}

    def put(self, member: int, part: Tensor) -> None:
        """Take a member's part, if it is still expected."""
        if self._counts(member):
            self._parts[member] = part

    def clipped(self) -> Tensor | None:
        """Return the CenteredClip mean, [n] float32, of the parts in the order of the members; None if no part is
        finite. This is slow, and frees the parts."""
        parts, self._parts = self._parts, {}
        finite = [member for member in sorted(parts) if bool(parts[member].isfinite().all())]
        self.counted.intersection_update(finite)
        if not finite:
            return None
        stacked = torch.stack([parts.pop(member) for member in finite])
        return clipped_mean(stacked, capped([self._weights[member] for member in finite]))


def capped(weights: list[float]) -> Tensor:
    """Return the weights, each capped at twice their (lower) median."""
    most = _MOST_WEIGHT * statistics.median_low(weights)
    return torch.tensor([min(weight, most) for weight in weights])


def clipped_mean(parts: Tensor, weights: Tensor) -> Tensor:
    """Return CenteredClip, [n] float32, of finite parts [members, n]; tau is the median of the parts' distances to
    their coordinatewise median.

    This centre depends on the present step alone, so that any owner of a chunk can compute it, even a new one. It lies
    among the honest parts while most members are honest. The usual centre, the last step's aggregate, is a state that
    new members do not have.
    """
    ordered = np.sort(parts.numpy(), axis=0)  # six times as fast as two medians of torch
    lower, upper = (torch.from_numpy(ordered[place]).double() for place in ((len(parts) - 1) // 2, len(parts) // 2))
    centre = (lower + upper) / 2
    tau = statistics.median(float((part.double() - centre).norm()) for part in parts)
    return centered_clip(parts, weights, tau, start=centre) if tau > 0 else centre.float()
