"""A server's metrics, and the HTTP server that Prometheus reads them from.

The HTTP server has a thread of its own, so that generation does not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.net.hosts import host_port
from swarm_server.core.counters import Counters
from swarm_server.metrics import families
from swarm_server.sessions.host import SessionManager

_TIMEOUT_S = 5.0  # for the event loop to report its state; Prometheus itself waits 10 s
Record = Callable[[], ServerRecord]
Sessions = Callable[[], SessionManager | None]


class ServerMetrics:
    """The metrics of a server: its counters, and its state once there is one.

    Attributes:
        registry: the collectors. Any thread but the event loop's may read them, because they wait for the event loop.
    """

    def __init__(self, counters: Counters, loop: asyncio.AbstractEventLoop) -> None:
        """Collect the counters; ``loop`` is the event loop on which the state changes."""
        self._loop = loop
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=self.registry)
        self.registry.register(_Collected(lambda: families.counted(counters)))

    def show_state(self, record: Record, sessions: Sessions) -> None:
        """Show the state from now on; ``record`` and ``sessions`` are called on the event loop."""

        async def read() -> list[Metric]:
            return list(families.state(record(), sessions()))

        self.registry.register(
            _Collected(lambda: asyncio.run_coroutine_threadsafe(read(), self._loop).result(_TIMEOUT_S))
        )


class Exporter:
    """An HTTP server that shows metrics. It must be closed.

    Attributes:
        url: the address of the metrics, with the port that was taken.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Listen. Raise ValueError if the address is not available."""
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"metrics cannot be served on port {port} of {host}: {reason}") from None
        self.url = f"http://{host_port(host, self._server.server_port)}/metrics"

    def close(self) -> None:
        """Stop the HTTP server and wait for its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because ``collect`` would otherwise be called to learn the names."""
        return []
