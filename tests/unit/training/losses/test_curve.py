"""Loss curves: what is written is read back, thinned out evenly; the picture is SVG with every point at its place."""

from __future__ import annotations

import json
import re
from math import inf, nan
from xml.etree import ElementTree

import pytest

from swarm_training.losses.curve import TRAINING, LossCurve
from swarm_training.losses.drawing import draw

SVG = "{http://www.w3.org/2000/svg}"


def curve_of(**series: list[tuple[int, float]]) -> LossCurve:
    curve = LossCurve()
    for name, points in series.items():
        for step, loss in points:
            curve.add(step, {name: loss})
    return curve


def test_lines_of_json_are_read_back() -> None:
    curve = curve_of(training=[(1, 3.5), (2, 3.0), (4, 2.5)], held_out=[(2, 3.25)])
    curve.add(5, {TRAINING: None, "held_out": nan})
    curve.add(6, {TRAINING: inf})
    lines = curve.json_lines()
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"step": 1, "training": 3.5},
        {"step": 2, "training": 3.0, "held_out": 3.25},
        {"step": 4, "training": 2.5},
    ]
    assert LossCurve.parse(lines).series == curve.series


def test_steps_that_were_undone_are_gone() -> None:
    curve = curve_of(training=[(1, 4.0), (2, 3.0), (3, 9.0)], held_out=[(3, 9.0)])
    curve.discard_after(2)
    assert curve.series == {"training": [(1, 4.0), (2, 3.0)]}
    curve.add(2, {TRAINING: 2.5})
    assert curve.series[TRAINING] == [(1, 4.0), (2, 2.5)]


def test_a_long_run_keeps_a_small_curve() -> None:
    curve = curve_of(training=[(step, 1.0 / step) for step in range(1, 4097)])
    assert len(curve.series[TRAINING]) == 4096
    curve.add(4097, {TRAINING: 0.5})
    assert curve.series[TRAINING] == [(step, 1.0 / step) for step in range(1, 4097, 2)] + [(4097, 0.5)]


@pytest.mark.parametrize(
    "line",
    ["", "[]", "{", '{"training": 1.0}', '{"step": -1}', '{"step": true}', '{"step": 1, "training": "x"}', "[" * 9000],
)
def test_a_line_that_is_none_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"line 2 is .*: expected a step and its losses"):
        LossCurve.parse(f'{{"step": 1, "training": 2.0}}\n{line}\n')


def test_the_picture_has_every_point_at_its_place() -> None:
    curve = curve_of(training=[(0, 4.0), (50, 3.0), (100, 2.0)], held_out=[(100, 3.0)])
    root = ElementTree.fromstring(draw(curve, "<run> & so on"))
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}title").text == "Loss of run <run> & so on"
    assert root.find(f"{SVG}desc").text == "training 2 at step 100, held_out 3 at step 100"
    lines = [
        [tuple(map(float, p.split(","))) for p in each.get("points").split()] for each in root.iter(f"{SVG}polyline")
    ]
    labels = {each.text: (float(each.get("x")), float(each.get("y"))) for each in root.iter(f"{SVG}text")}
    (first, middle, last), held_out = lines
    assert (first[0], last[0]) == (labels["0"][0], labels["100"][0]) and middle[0] == (first[0] + last[0]) / 2
    assert (first[1], middle[1], last[1]) == (labels["4"][1], labels["3"][1], labels["2"][1])
    assert held_out == [(last[0], middle[1])] * 2


@pytest.mark.parametrize(
    "points", [[(7, 2.5)], [(0, 0.0), (1, 0.0)], [(1, 1e-9), (2, 1e30)], [(10**9, -3.0)], [(1, 1e15), (2, 1e15 + 1)]]
)
def test_any_finite_losses_can_be_drawn(points: list[tuple[int, float]]) -> None:
    root = ElementTree.fromstring(draw(curve_of(training=points), "run"))
    places = [float(number) for number in re.split("[ ,]", root.find(f"{SVG}polyline").get("points"))]
    assert len(places) == 4 and all(0 <= number <= 720 for number in places)
    assert 4 <= len([each for each in root.iter(f"{SVG}line") if each.get("class") == "grid"]) <= 8
