"""The application: all routers, the count of requests, and the shape of refusals."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from swarm_gateway.anthropic_api.endpoints import ANTHROPIC_PREFIX, anthropic_router
from swarm_gateway.anthropic_api.formats import ANTHROPIC
from swarm_gateway.batch_api.endpoints import batch_router
from swarm_gateway.batch_api.store import BatchStore
from swarm_gateway.batch_api.worker import BatchWorker
from swarm_gateway.limits.admission import DEFAULT_LIMITS, ApiError, GatewayLimits, LocalAdmission, RequestAdmission
from swarm_gateway.limits.preparing import Preparations
from swarm_gateway.monitor_api.endpoints import MONITOR_PREFIX, Monitored, monitor_router
from swarm_gateway.ollama_api.endpoints import OLLAMA_PREFIX, ollama_router
from swarm_gateway.ollama_api.formats import OLLAMA
from swarm_gateway.openai_api.endpoints import openai_router
from swarm_gateway.pages.router import add_pages
from swarm_gateway.responses_api.endpoints import responses_router
from swarm_gateway.responses_api.store import ResponseStore
from swarm_gateway.web.http import OPENAI, Dialect, Gateway, as_api_error, refusal
from swarm_gateway.web.metrics import CountRequests, Metrics
from swarm_gateway.web.models import SwarmModels
from swarm_protocol.telemetry.exporting import Telemetry

_WATCHED = ("/health", "/metrics")


def create_app(
    models: SwarmModels,
    limits: GatewayLimits = DEFAULT_LIMITS,
    keys: Sequence[str] = (),
    monitored: Monitored | None = None,
    responses: ResponseStore | None = None,
    batches: BatchStore | None = None,
    telemetry: Telemetry | None = None,
    admission: RequestAdmission | None = None,
    answers_batches: bool = True,
) -> FastAPI:
    """Return the application, which serves on one event loop.

    Args:
        monitored: the swarm that ``/api/v1`` shows; None if there is no such API.
        responses: the responses that later requests may go on from; by default they are kept in memory.
        batches: the files and batches; None if there are none. They go on while the application runs.
        telemetry: where traces and metrics go besides ``/metrics``.
        admission: what decides on requests; by default ``limits`` of this process alone.
        answers_batches: whether this process answers the requests of ``batches``.
    """
    admission = admission or LocalAdmission(limits, is_shared=len(keys) > 1)
    gateway = Gateway(models, admission, Preparations(admission), Metrics(admission), tuple(keys))
    worker = None if batches is None else BatchWorker(gateway, batches)

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        if worker is not None and answers_batches:
            worker.start()
        yield
        if worker is not None:
            await worker.stop()

    # FastAPI's documentation pages would load foreign scripts.
    app = FastAPI(title="swarm", openapi_url=None, lifespan=running, telemetry=_traced(telemetry))
    if telemetry is not None:
        telemetry.export(gateway.metrics.registry)
    app.add_middleware(CountRequests, metrics=gateway.metrics)
    app.include_router(openai_router(gateway))
    app.include_router(responses_router(gateway, responses or ResponseStore()))
    app.include_router(anthropic_router(gateway))
    app.include_router(ollama_router(gateway))
    if worker is not None:
        app.include_router(batch_router(gateway, worker))
    if monitored is not None:
        app.include_router(monitor_router(gateway, monitored))
    add_pages(app)
    _add_watched_paths(app, gateway)
    _add_refusals(app)
    return app


def _add_watched_paths(app: FastAPI, gateway: Gateway) -> None:
    """Add the paths that monitors of the process ask."""

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", dependencies=[Depends(gateway.admit)])
    async def show_metrics() -> Response:
        return Response(await gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_refusals(app: FastAPI) -> None:
    """Answer errors in the shape of the API that was asked."""

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return refusal(error, _dialect_of(request.url.path))

    @app.exception_handler(sqlite3.Error)  # such as a full disk, outside of answers in chunks
    async def refuse_for_now(request: Request, error: sqlite3.Error) -> Response:
        return refusal(as_api_error(error), _dialect_of(request.url.path))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = f"{request.method} {path}: {error.detail}"
        return refusal(ApiError(error.status_code, message), _dialect_of(path))


def _traced(telemetry: Telemetry | None) -> TelemetryConfig:
    """Return the settings of tracing: a span for each request, except for the requests of monitors."""
    if telemetry is None or telemetry.tracer_provider is None:
        return {}
    return {
        "tracer_provider": telemetry.tracer_provider,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": lambda scope: scope.get("path") in _WATCHED,
    }


def _dialect_of(path: str) -> Dialect:
    """Return the API that the path belongs to."""
    if path == ANTHROPIC_PREFIX or path.startswith(f"{ANTHROPIC_PREFIX}/"):
        return ANTHROPIC
    return OLLAMA if path.startswith(OLLAMA_PREFIX) and not path.startswith(MONITOR_PREFIX) else OPENAI
