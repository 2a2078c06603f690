"""Whether a group would be faster without one of its followers, from the times of its products, with hysteresis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

SLOW, WELL = 1.3, 1.1  # times as long as without the follower: counts as a slow window, or ends a row of them
MANY_WINDOWS = 6  # slow windows in a row after which a follower is left out
BUSY_S = 0.5  # of products in a window; a window with less says nothing


def slowdown(shares: Sequence[float], times_s: Sequence[float], member: int) -> float:
    """Return the time of the group's products, divided by their time without this follower.

    ``shares``: each member's part of the rows. ``times_s``: the time of the leader's own rows, and of waiting for each
    follower. Without the follower, the leader would have more rows, in proportion. Infinite if the group did nothing
    but wait for this follower.
    """
    without_s = times_s[0] / (1 - shares[member]) + sum(times_s[1:]) - times_s[member]
    return sum(times_s) / without_s if without_s else inf


@dataclass(frozen=True)
class SlowWindows:
    """How many windows in a row each follower has made the group slow.

    Attributes:
        counts: one for each member; the leader's is always 0.
    """

    counts: tuple[int, ...]

    @classmethod
    def none(cls, members: int) -> SlowWindows:
        """Return the state of a group that has just begun."""
        return cls((0,) * members)

    def after(self, shares: Sequence[float], times_s: Sequence[float]) -> SlowWindows:
        """Return the state after one more window, in which products took these times."""
        if sum(times_s) < BUSY_S:
            return self
        followers = range(1, len(self.counts))
        counts = (_count(self.counts[each], slowdown(shares, times_s, each)) for each in followers)
        return SlowWindows((0, *counts))

    @property
    def slow_follower(self) -> int | None:
        """Return the number of the follower to leave out, the slowest for longest; None if all are fast enough."""
        longest = max(self.counts)
        return self.counts.index(longest) if longest >= MANY_WINDOWS else None


def _count(before: int, times_as_long: float) -> int:
    if times_as_long > SLOW:
        return before + 1
    return 0 if times_as_long < WELL else before
