"""The order of computation: requests of one expert wait a short time for each other, to form a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass
class _Waiting(Generic[T]):
    items: deque[tuple[T, int, float]] = field(default_factory=deque)  # with rows and time of arrival in seconds
    rows: int = 0

    def add(self, item: T, rows: int, now: float) -> None:
        self.items.append((item, rows, now))
        self.rows += rows

    def take(self, max_rows: int) -> list[T]:
        """Remove and return the oldest items: at least one, and no more rows than ``max_rows`` otherwise."""
        items: list[T] = []
        taken = 0
        while self.items and (not items or taken + self.items[0][1] <= max_rows):
            item, rows, _ = self.items.popleft()
            items.append(item)
            taken += rows
        self.rows -= taken
        return items


class BatchQueue(Generic[K, T]):
    """The waiting items, by key; items of one key are computed together.

    A batch is due when its oldest item has waited for ``window_s``, or it is full.
    """

    def __init__(self, window_s: float, max_rows: int) -> None:
        self._window_s = window_s
        self._max_rows = max_rows
        self._waiting: dict[K, _Waiting[T]] = {}

    def add(self, key: K, item: T, rows: int, now: float) -> None:
        self._waiting.setdefault(key, _Waiting()).add(item, rows, now)

    def due_in_s(self, now: float) -> float | None:
        """Return the time until the next batch is due: 0 if it is due now, None if nothing waits."""
        return min((max(0.0, self._due_at(waiting) - now) for waiting in self._waiting.values()), default=None)

    def take(self) -> tuple[K, list[T]]:
        """Remove and return the batch that is due first, which must exist: at least one item, no more rows than fit."""
        key = min(self._waiting, key=lambda each: self._due_at(self._waiting[each]))
        waiting = self._waiting[key]
        items = waiting.take(self._max_rows)
        if not waiting.items:
            del self._waiting[key]
        return key, items

    def _due_at(self, waiting: _Waiting[T]) -> float:
        came = waiting.items[0][2]
        return came if waiting.rows >= self._max_rows else came + self._window_s
