"""The moment of a run: how often it has gone back to a checkpoint, and how many global steps it has taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Moment:
    """A point in a run's history. Moments are ordered: after a rollback a step number can recur, a moment cannot."""

    rollbacks: int
    step: int

    def __str__(self) -> str:
        return f"{self.rollbacks}/{self.step}"
