"""The HTTP server that Prometheus asks, in a thread of its own: nobody who generates waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from swarm_protocol.dht.records import ServerRecord
from swarm_server.core.counters import Counters
from swarm_server.metrics import families
from swarm_server.sessions.host import SessionManager

_TIMEOUT_S = 5.0  # for the event loop to say how it is; Prometheus itself waits 10 s
Record = Callable[[], ServerRecord]
Sessions = Callable[[], SessionManager | None]


class Exporter:
    """Shows the counters of a server, and once it has a state that as well. To be closed.

    Attributes:
        url: where; the port is the one that was taken.
    """

    def __init__(self, host: str, port: int, counters: Counters, loop: asyncio.AbstractEventLoop) -> None:
        """``loop``: on which the state changes. Raises ValueError if it cannot listen at the address."""
        self._loop = loop
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=self._registry)
        self._registry.register(_Collected(lambda: families.counted(counters)))
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"metrics cannot be served on port {port} of {host}: {reason}") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def show_state(self, record: Record, sessions: Sessions) -> None:
        """What is asked on the event loop from now on."""

        async def read() -> list[Metric]:
            return list(families.state(record(), sessions()))

        self._registry.register(
            _Collected(lambda: asyncio.run_coroutine_threadsafe(read(), self._loop).result(_TIMEOUT_S))
        )

    def close(self) -> None:
        """Waits for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise ``collect`` would be called to learn the names."""
        return []
