"""The pauses before something that has failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 32  # so that the power of two stays a finite number after any number of failures


@dataclass(frozen=True)
class Backoff:
    """Pauses that grow with the number of consecutive failures.

    Attributes:
        first_s: the pause after the first failure; it doubles with each failure that follows, up to ``most_s``.
    """

    first_s: float
    most_s: float

    def after(self, failures: int) -> float:
        """Return the pause after this many consecutive failures, in seconds."""
        return float(min(self.first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), self.most_s))
