"""When in a run: how often it has gone back to a checkpoint, and how many global steps it has taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Moment:
    """Moments are in order: the number of a step can come again after a rollback, a moment cannot."""

    rollbacks: int
    step: int

    def __str__(self) -> str:
        return f"{self.rollbacks}/{self.step}"
