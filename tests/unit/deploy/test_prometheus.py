"""Queries of dashboards and alerts can be parsed, and name what is exported; alerts fire when they should."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.unit.deploy import exported
from tests.unit.deploy.places import DEPLOY

DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/swarm.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
VARIABLES = {"$__rate_interval": "5m", "$model": "llama", "${datasource}": "prometheus"}
WIDTH = 24  # of a dashboard, in Grafana's columns


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """All there are, and where they stand."""
    for panel in panels():
        for target in panel["targets"]:
            expr = target["expr"]
            for variable, value in VARIABLES.items():
                expr = expr.replace(variable, value)
            yield panel["title"], expr
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def metric_names(node: Any) -> set[str]:
    """Of the vectors that an expression selects."""
    if isinstance(node, promql_parser.VectorSelector):
        return {node.name}
    below = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "param", "vector_selector", "vs")]
    below += getattr(node, "args", None) or []
    return {name for child in below if child is not None for name in metric_names(child)}


@pytest.fixture(scope="module")
def known() -> set[str]:
    return exported.of_servers() | exported.of_gateway() | exported.BY_PROMETHEUS


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_queries_name_metrics_that_are_exported(place: str, query: str, known: set[str]) -> None:
    names = metric_names(promql_parser.parse(query))
    assert names and names <= known, place


def test_names_are_found_wherever_they_stand() -> None:
    query = "histogram_quantile(0.9, sum by (le) (rate(a_bucket[5m]))) / (b > 0) or absent(-c) unless topk(2, d)"
    assert metric_names(promql_parser.parse(query)) == {"a_bucket", "b", "c", "d"}


# ------------------------------------------------------------ the dashboard


def test_panels_have_ids_and_queries_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters), panel["title"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}


def test_no_panel_lies_on_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_its_data_source_is_provisioned() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource"]
    assert source["type"] == variable["query"] and source["uid"] == variable["current"]["value"]


# ------------------------------------------------------------ with Prometheus' own tool


def promtool(*arguments: str, cwd: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not there: it comes with Prometheus")
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_good() -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yml", cwd=DEPLOY / "prometheus")
    promtool("check", "rules", "alerts.yml", cwd=DEPLOY / "prometheus")


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml", cwd=Path(__file__).parent)
