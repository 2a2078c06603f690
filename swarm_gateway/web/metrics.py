"""The gateway's metrics, for Prometheus."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_gateway.limits.admission import QueueLoad, RequestAdmission

_FIRST_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_GAP_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SHARED_FILES = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's variable for the directory that processes share
DISCONNECTED = 499  # as in nginx: the client did not wait for the answer


class _LoadCollector(Collector):
    """A collector of the load that a function returns at each collection."""

    def __init__(self, load: Callable[[], QueueLoad]) -> None:
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        yield GaugeMetricFamily("swarm_generations_active", "Generations under way.", load.num_active)
        yield GaugeMetricFamily("swarm_generations_queued", "Generations that wait for their turn.", load.num_queued)


class Metrics:
    """The metrics of this process.

    Attributes:
        registry: the values that this process alone has counted.
    """

    def __init__(self, admission: RequestAdmission) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "swarm_requests", "Requests by endpoint and HTTP status.", ["endpoint", "status"], registry=self.registry
        )
        self.prompt_tokens = Counter("swarm_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.generated_tokens = Counter("swarm_generated_tokens", "Tokens generated.", registry=self.registry)
        self.first_s = Histogram(
            "swarm_time_to_first_token_seconds",
            "Time from a request to the first token of each of its generations.",
            buckets=_FIRST_S,
            registry=self.registry,
        )
        self.gap_s = Histogram(
            "swarm_time_between_tokens_seconds", "Time between two tokens.", buckets=_GAP_S, registry=self.registry
        )
        self.registry.register(_LoadCollector(lambda: admission.own_load))
        self._admission = admission

    async def text(self) -> bytes:
        """Return the metrics of the whole gateway, which are the sums over all of its processes."""
        if SHARED_FILES not in os.environ:
            return generate_latest(self.registry)
        registry, load = CollectorRegistry(), await self._admission.load()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(_LoadCollector(lambda: load))
        return generate_latest(registry)


class TokenTimes:
    """A recorder of one generation's token times; ``began_s`` is the request's arrival by ``time.perf_counter``."""

    def __init__(self, metrics: Metrics, began_s: float) -> None:
        self._metrics, self._last_s, self._is_first = metrics, began_s, True

    def token(self) -> None:
        now = time.perf_counter()
        histogram = self._metrics.first_s if self._is_first else self._metrics.gap_s
        histogram.observe(now - self._last_s)
        self._metrics.generated_tokens.inc()
        self._last_s, self._is_first = now, False


class CountRequests:
    """A middleware that counts requests by route. It labels unknown paths "other", to limit the number of labels."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_counted = False

        def count(status: int) -> None:
            nonlocal is_counted
            is_counted = True
            self._metrics.requests.labels(getattr(scope.get("route"), "path", "other"), str(status)).inc()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            if not is_counted:
                error = sys.exception()
                is_ours = isinstance(error, Exception) and not isinstance(error, ClientDisconnect)
                count(500 if is_ours else DISCONNECTED)  # the outermost layer of the application sends status 500
