"""The gateway's metrics, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_gateway.limits.admission import GenerationQueue

_FIRST_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_GAP_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
DISCONNECTED = 499  # as in nginx: the client did not wait for the answer


class Metrics:
    def __init__(self, queue: GenerationQueue) -> None:
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
        active = Gauge("swarm_generations_active", "Generations under way.", registry=self.registry)
        active.set_function(lambda: queue.num_active)
        queued = Gauge("swarm_generations_queued", "Generations that wait for their turn.", registry=self.registry)
        queued.set_function(lambda: queue.num_queued)

    def text(self) -> bytes:
        return generate_latest(self.registry)


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
                count(DISCONNECTED)
