"""The drawing of a loss curve as an SVG that needs no other file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from swarm_training.losses.curve import LossCurve, Point

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 44
_TICKS = 5
_STYLE = """
svg { color-scheme: light dark; background: light-dark(#fff, #15181a); font: 13px system-ui, sans-serif; }
text { fill: light-dark(#1b1d1e, #e7e9e8); }
.grid { stroke: light-dark(#e1e1db, #2e3438); }
.series { fill: none; stroke-width: 2; stroke-linejoin: round; }
.s0 { stroke: light-dark(#0b6e63, #56cdb6); }
.s1 { stroke: light-dark(#a8281d, #ff9d92); stroke-dasharray: 7 4; }
.s2 { stroke: light-dark(#7d5200, #e9bd6a); stroke-dasharray: 2 3; }
"""
_NUM_STYLES = 3


class _Scale:
    """The scale of one axis, from numbers to pixels, and its labelled ticks."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        low, high = min(values), max(values)
        least = 1e-6 * max(abs(low), abs(high)) or 1.0  # else ticks would differ by less than doubles can
        if high - low < least:
            low, high = low - least, high + least
        self._distance = _nice((high - low) / _TICKS)
        self._low = floor(low / self._distance) * self._distance
        self._high = ceil(high / self._distance) * self._distance
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        return self._begin + (value - self._low) / (self._high - self._low) * (self._end - self._begin)

    def ticks(self) -> Iterator[float]:
        for number in range(round((self._high - self._low) / self._distance) + 1):
            yield self._low + number * self._distance + 0.0  # the addition turns -0 into 0


def draw(curve: LossCurve, run: str) -> str:
    """Return the SVG of a curve with at least one point. ``run``: its name, for the title."""
    points = [point for series in curve.series.values() for point in series]
    assert points
    across = _Scale([float(step) for step, _ in points], _LEFT, _WIDTH - _RIGHT)
    upwards = _Scale([loss for _, loss in points], _HEIGHT - _BOTTOM, _TOP)
    last = ", ".join(f"{name} {series[-1][1]:.4g} at step {series[-1][0]}" for name, series in curve.series.items())
    title = escape(f"Loss of run {run}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title><desc>{escape(last)}</desc><style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="22" font-weight="600">{title}</text>',
        *_axes(across, upwards),
        *_lines(curve, across, upwards),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axes(across: _Scale, upwards: _Scale) -> Iterator[str]:
    for loss in upwards.ticks():
        y = f"{upwards(loss):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end" dominant-baseline="middle">{loss:.4g}</text>'
    for step in across.ticks():
        if step == int(step) and step >= 0:  # ticks of a short run lie between steps, or before step 0
            yield f'<text x="{across(step):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{int(step)}</text>'
    yield f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">global step</text>'


def _lines(curve: LossCurve, across: _Scale, upwards: _Scale) -> Iterator[str]:
    for number, (name, points) in enumerate(curve.series.items()):
        style, y = f"series s{number % _NUM_STYLES}", 22
        x = _WIDTH - _RIGHT - 130 * (len(curve.series) - number)
        yield f'<polyline class="{style}" stroke-linecap="round" points="{_path(points, across, upwards)}"/>'
        yield f'<line class="{style}" x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}"/>'
        yield f'<text x="{x + 32}" y="{y}">{escape(name)}</text>'


def _path(points: Sequence[Point], across: _Scale, upwards: _Scale) -> str:
    """Return the points in pixels. A single point comes twice, because browsers draw no line of one point."""
    places = [f"{across(step):.1f},{upwards(loss):.1f}" for step, loss in points]
    return " ".join(places if len(places) > 1 else places * 2)


def _nice(distance: float) -> float:
    """Return the least number of the form 1, 2 or 5 × 10ⁿ that is not less than ``distance``."""
    size = 10.0 ** floor(log10(distance))
    return next((factor * size for factor in (1, 2, 5) if factor * size >= distance), 10 * size)
