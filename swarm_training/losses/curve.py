"""The losses of a run by global step. They are written beside each checkpoint as lines of JSON."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Point = tuple[int, float]  # a step and its loss
TRAINING, HELD_OUT = "training", "held out"
_MOST_POINTS = 4096  # of one series: a quarter of a MB
_MAX_STEP = 1 << 53
_LARGEST = 1e30


class LossCurve:
    """The losses of a run by name, such as "training", and by step. Above 4096 points, every second one is dropped."""

    def __init__(self) -> None:
        self._series: dict[str, list[Point]] = {}

    @property
    def series(self) -> Mapping[str, list[Point]]:
        """Return the points of each series, by step. No series is empty."""
        return MappingProxyType(self._series)

    def add(self, step: int, losses: Mapping[str, float | None]) -> None:
        """Add the losses of a step. They replace the losses of this step and of later ones. ``None``, losses that are
        not finite and those beyond 10³⁰ are left out."""
        for name, loss in losses.items():
            if loss is not None and abs(loss) <= _LARGEST:
                known = self._series.get(name, [])
                points = [*known[: bisect_left(known, step, key=lambda point: point[0])], (step, loss)]
                self._series[name] = points[::2] if len(points) > _MOST_POINTS else points

    def discard_after(self, step: int) -> None:
        """Discard the losses of later steps, which a rollback has undone."""
        kept = {name: [point for point in points if point[0] <= step] for name, points in self._series.items()}
        self._series = {name: points for name, points in kept.items() if points}

    def json_lines(self) -> str:
        """Return a line of JSON for each step, such as ``{"step": 3, "training": 2.5}``."""
        lines: dict[int, dict[str, float]] = {}
        for name, points in self._series.items():
            for step, loss in points:
                lines.setdefault(step, {})[name] = loss
        return "".join(json.dumps({"step": step, **lines[step]}) + "\n" for step in sorted(lines))

    @classmethod
    def parse(cls, text: str) -> LossCurve:
        """Return the curve that ``json_lines`` has written. Raise ValueError if a line is not one of its lines."""
        curve = cls()
        for number, line in enumerate(text.splitlines(), 1):
            step, losses = _parsed(line, number)
            curve.add(step, losses)
        return curve


def _parsed(line: str, number: int) -> tuple[int, dict[str, float]]:
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    losses = dict(values) if isinstance(values, dict) else {}
    step = losses.pop("step", None)
    if type(step) is not int or not 0 <= step <= _MAX_STEP or not all(type(loss) is float for loss in losses.values()):
        raise ValueError(
            f'line {number} is {line[:80]!r}: expected a step and its losses, {{"step": 3, "training": 2.5}}'
        )
    return step, losses
