"""The weighted mean of one chunk, as its owner computes it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class ChunkSum:
    """Adds the members' parts in the order of the members, whatever order they arrive in: sums of floats depend on it.

    Attributes:
        mean: [n] float32, once all have arrived or are left out; None before, and if nothing has arrived.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        """``weights``: of the members that have something to add, all above 0."""
        self._weights = weights
        self._waiting = sorted(weights)  # in whose order is added
        self._early: dict[int, Tensor] = {}
        self._left_out: set[int] = set()
        self._total: Tensor | None = None
        self._weight = 0.0
        self.mean: Tensor | None = None
        self._advance()

    @property
    def is_done(self) -> bool:
        return not self._waiting

    @property
    def missing(self) -> frozenset[int]:
        return frozenset(self._waiting) - self._early.keys() - self._left_out

    def put(self, member: int, part: Tensor) -> None:
        """Ignored if the part of this member is not waited for (any more)."""
        if member in self.missing:
            self._early[member] = part
            self._advance()

    def leave_out(self, member: int) -> None:
        """Nothing comes from this member any more."""
        if member in self.missing:
            self._left_out.add(member)
            self._advance()

    def _advance(self) -> None:
        while self._waiting and (self._waiting[0] in self._early or self._waiting[0] in self._left_out):
            member = self._waiting.pop(0)
            if member not in self._early:
                continue
            weighted = self._early.pop(member) * self._weights[member]
            self._total = weighted if self._total is None else self._total.add_(weighted)
            self._weight += self._weights[member]
        if not self._waiting and self._total is not None and self.mean is None:
            self.mean = self._total / self._weight
