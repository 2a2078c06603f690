"""The HTTP endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from swarm_client.gateway.admission import (
    DEFAULT_LIMITS,
    ApiError,
    FairQueue,
    Limits,
    RateLimit,
    check_key,
    is_loopback,
)
from swarm_client.gateway.formats import ChatFormat, CompletionFormat, TokenTexts, usage
from swarm_client.gateway.generating import Work, while_connected
from swarm_client.gateway.metrics import CountRequests, Metrics
from swarm_client.gateway.models import Models, not_found
from swarm_client.gateway.requests import ChatRequest, CompletionRequest, parse
from swarm_client.gateway.sampling import requests_of
from swarm_protocol.errors import RequestRejected, SwarmError

_logger = logging.getLogger(__name__)
_MOST_BYTES = 8 * 2**20  # of a request
_EVENT_STREAM = "text/event-stream"
_AS_IT_COMES = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies are to pass it on at once
_DONE = b"data: [DONE]\n\n"


def create_app(
    models: Models,
    limits: Limits = DEFAULT_LIMITS,
    keys: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Serves on one event loop.

    Args:
        keys: whoever has one of them may ask; none: everybody may who calls this machine by a name of its loopback,
            which keeps out pages that a browser has from elsewhere.
        clock: seconds, for limits by time.
    """
    app = FastAPI(title="swarm", openapi_url=None)  # its pages of documentation would load scripts from elsewhere
    queue, rate = FairQueue(limits), RateLimit(limits.requests_per_minute, clock)
    metrics = Metrics(queue)
    app.add_middleware(CountRequests, metrics=metrics)
    created = int(time.time())

    def admit(request: Request) -> str:
        """The key of who asks. Raises ApiError if there must be one, and is none."""
        if keys:
            return check_key(keys, request.headers.get("Authorization"))
        if not is_loopback(request.url.hostname or ""):
            raise ApiError(403, f"{request.url.hostname} is no name of this machine's loopback")
        return ""

    async def answer(kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
        began_s, key = time.perf_counter(), admit(request)
        rate.count(key)
        asked: ChatRequest | CompletionRequest = parse(kind, await _body(request))

        async def chunks() -> AsyncGenerator[bytes, None]:
            model = await models.get(asked.model)
            requests = await asyncio.to_thread(requests_of, asked, model)
            num_prompt = sum(len(each.prompt) for each in requests[:: asked.n])
            texts = None if asked.num_logprobs is None else TokenTexts(model.tokenizer)
            form = (ChatFormat if isinstance(asked, ChatRequest) else CompletionFormat)(model.name, texts)
            work = Work(model, requests, asked.stop, queue.join(key, len(requests)), metrics, began_s)
            metrics.prompt_tokens.inc(num_prompt)
            async with aclosing(work.deltas()) as deltas:
                if not asked.stream:
                    found = [delta async for delta in deltas]
                    yield _json(form.whole(found, len(requests), usage(num_prompt, work.num_generated)))
                    return
                async for delta in deltas:
                    yield _event(form.chunk(delta))
            if asked.wants_usage:
                yield _event(form.last_chunk(usage(num_prompt, work.num_generated)))
            yield _DONE

        return _Answer(chunks(), _EVENT_STREAM if asked.stream else "application/json")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(ChatRequest, request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answer(CompletionRequest, request)

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "swarm"}

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        admit(request)
        return JSONResponse({"object": "list", "data": [described(name) for name in await models.names()]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str, request: Request) -> Response:
        admit(request)
        if name not in await models.names():
            raise not_found(name)
        return JSONResponse(described(name))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        admit(request)
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(ApiError)
    async def refuse(_request: Request, error: ApiError) -> Response:
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        return _refusal(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    return app


class _Answer(Response):
    """Sends chunks as they come; once the client has gone, their making is cancelled.

    Until there is a first chunk, an error has an HTTP status of its own. Later, it is the last event of the stream.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(media_type=media_type, headers=_AS_IT_COMES)
        del self.headers["content-length"]  # of nothing
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                chunk = await anext(chunks)
            except Exception as error:
                return await _refusal(_as_api_error(error))(scope, receive, send)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                last = _event(_as_api_error(error).body)
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SwarmError) and not isinstance(error, RequestRejected):
        return ApiError(503, str(error), code="swarm_error")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    _logger.error("a request failed", exc_info=error)
    return ApiError(500, "this server has made a mistake, which is in its log", code="internal_error")


def _refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def _body(request: Request) -> bytes:
    """Raises ApiError if it is too large, or was sent by a form: pages of other sites may send those."""
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body has another type: expected `Content-Type: application/json`")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise ApiError(413, f"the body is larger than {_MOST_BYTES} bytes")
    return bytes(body)


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _event(content: Any) -> bytes:
    return b"data: " + _json(content) + b"\n\n"
