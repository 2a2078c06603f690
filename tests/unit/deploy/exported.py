"""The metrics that servers and the HTTP API export, by the names that queries know them by."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from swarm_gateway.limits.admission import LocalAdmission
from swarm_gateway.web.metrics import Metrics
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.span import Span
from swarm_server.core.counters import Counters
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.offload import KvOffload
from swarm_server.metrics import families

BY_PROMETHEUS = {"up"}
OF_PROCESSES = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"}


def sample_names(text: str) -> set[str]:
    """Of everything that is exported. Nothing has been counted yet, so labelled metrics have a name and no samples."""
    names = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {f"{family.name}{suffix}" for suffix in suffixes}
    return names


class _Everything(Collector):
    def __init__(self, peer_id: str) -> None:
        self._peer_id = peer_id

    def collect(self) -> Iterable[Metric]:
        services = SimpleNamespace(budget=CacheBudget(8, 1), offload=KvOffload())
        sessions = SimpleNamespace(num_sessions=0, admission=(), services=services)
        record = ServerRecord(self._peer_id, ("127.0.0.1:1",), "model", "revision", 2, Span(0, 1))
        yield from families.counted(Counters())
        yield from families.state(record, sessions)


def state_text(peer_id: str) -> str:
    """What a server with this peer id exports."""
    registry = CollectorRegistry()
    registry.register(_Everything(peer_id))
    return generate_latest(registry).decode()


def of_servers() -> set[str]:
    return sample_names(state_text("peer")) | OF_PROCESSES


def of_gateway() -> set[str]:
    return sample_names(asyncio.run(Metrics(LocalAdmission()).text()).decode())
