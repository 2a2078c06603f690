"""A server exports its metrics where variables of OpenTelemetry ask for it, without a port for Prometheus."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from swarm_protocol.telemetry.exporting import Telemetry
from swarm_server.core.config import ServerConfig
from swarm_server.core.counters import Counters
from swarm_server.node import server
from tests.unit.recorded import recorded
from tests.unit.support import run, server_record


def has_metrics() -> bool:
    """Whether a server collects any during its life, in which it decodes 7 positions."""

    async def life() -> bool:
        counters = Counters()
        async with AsyncExitStack() as cleanup:
            metrics = await server._export(ServerConfig(), counters, cleanup)
            if metrics is not None:
                metrics.show_state(server_record, lambda: None)
            counters.positions["decode"] += 7
        return metrics is not None

    return run(life())


def test_the_last_metrics_are_exported_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    services: list[str] = []
    with recorded() as found:
        telemetry = found.telemetry
        monkeypatch.setattr(server, "start", lambda service: services.append(service) or telemetry)
        assert has_metrics()
    assert services == ["swarm-server"]
    (scope,) = found.metrics.kept[0].resource_metrics[0].scope_metrics
    points: dict[str, Any] = {metric.name: metric.data.data_points for metric in scope.metrics}
    (decode,) = points["swarm_server_positions"]
    assert decode.attributes == {"kind": "decode"} and decode.value == 7
    assert [point.value for point in points["swarm_server_state"] if point.attributes == {"state": "online"}] == [1]


def test_metrics_that_nobody_reads_are_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "start", lambda _service: Telemetry())
    assert not has_metrics()
