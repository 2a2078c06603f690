"""A server exports its metrics where variables of OpenTelemetry ask for it, without a port for Prometheus."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

import tests.unit.recorded  # noqa: F401  # skips this module where OpenTelemetry is not there
from swarm_server.core.config import ServerConfig
from swarm_server.core.counters import Counters
from swarm_server.node.server import _export
from tests.unit.support import run, server_record


def exported(capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, object]]]:
    """What the server writes at its end: it also has its state then, which its event loop has to tell."""

    async def life() -> None:
        counters = Counters()
        counters.positions["decode"] += 7
        async with AsyncExitStack() as cleanup:
            metrics = await _export(ServerConfig(), counters, cleanup)
            if metrics is not None:
                metrics.show_state(server_record, lambda: None)
            await asyncio.sleep(0)

    run(life())
    out = capsys.readouterr().out
    if not out:
        return {}
    (resource,) = json.loads(out)["resource_metrics"]
    assert resource["resource"]["attributes"]["service.name"] == "swarm-server"
    (scope,) = resource["scope_metrics"]
    return {metric["name"]: metric["data"]["data_points"] for metric in scope["metrics"]}


def test_the_last_metrics_are_written_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    found = exported(capsys)
    (decode,) = found["swarm_server_positions"]
    assert decode["attributes"] == {"kind": "decode"} and decode["value"] == 7
    online = [point["value"] for point in found["swarm_server_state"] if point["attributes"] == {"state": "online"}]
    assert online == [1]


def test_without_variables_there_are_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)
    assert exported(capsys) == {}
