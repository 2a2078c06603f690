"""What all endpoints share: who may ask, bodies, answers that come in parts, and refusals in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from swarm_client.gateway.admission import ApiError, FairQueue, RateLimit, check_key, is_loopback
from swarm_client.gateway.metrics import DISCONNECTED, Metrics
from swarm_client.gateway.models import Models
from swarm_client.gateway.preparing import Preparations
from swarm_protocol.errors import RequestRejected, SwarmError
from swarm_protocol.net.hosts import split_address
from swarm_protocol.wire.printable import printable

_logger = logging.getLogger(__name__)
_MOST_BYTES = 8 * 2**20  # of a request
_EVENT_STREAM = "text/event-stream"
_AS_IT_COMES = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies are to pass it on at once


@dataclass(frozen=True)
class Gateway:
    """What the endpoints of one server share.

    Attributes:
        keys: whoever has one of them may ask; none: everybody may who calls this machine by a name of its loopback,
            which keeps out pages that a browser has from elsewhere.
    """

    models: Models
    queue: FairQueue
    rate: RateLimit
    metrics: Metrics
    keys: tuple[str, ...] = ()
    preparations: Preparations = field(default_factory=Preparations)
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def admit(self, request: Request) -> str:
        """The key of who asks, for ``Depends``. Raises ApiError if there must be one, and is none."""
        if self.keys:
            return check_key(self.keys, request.headers.get("Authorization"))
        if not is_loopback(host := _called_host(request)):
            raise ApiError(403, f"{printable(host)!r} is no name of this machine's loopback")
        return ""


def _called_host(request: Request) -> str:
    """As its one ``Host`` header says, which browsers always send; otherwise, or if it is none, an empty string.

    ``request.url`` is of no use: it has the address of the socket where the header is not understood.
    """
    try:
        (header,) = request.headers.getlist("Host")
        return split_address(header, 0)[0]
    except ValueError:
        return ""


class Answer(Response):
    """Sends chunks as they come; once the client has gone, their making is cancelled.

    Until there is a first chunk, an error has an HTTP status of its own. Later, it is the last event of the stream.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], *, is_stream: bool) -> None:
        """``is_stream``: the chunks are events."""
        super().__init__(media_type=_EVENT_STREAM if is_stream else "application/json", headers=_AS_IT_COMES)
        del self.headers["content-length"]  # of nothing
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                chunk = await anext(chunks)
            except Exception as error:
                return await refusal(_as_api_error(error))(scope, receive, send)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                last = event(_as_api_error(error).body)
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, whose request has been read, and cancels it at once if the client goes."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        await end_tasks([working, leaving])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SwarmError) and not isinstance(error, RequestRejected):
        return ApiError(503, str(error), code="swarm_error")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    _logger.error("a request failed", exc_info=error)
    return ApiError(500, "this server has made a mistake, which is in its log", code="internal_error")


def refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def read_body(request: Request) -> bytes:
    """Return the whole body.

    Raises ApiError if it is too large, was sent by a form, as pages of other sites may do, or if the client leaves.
    """
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body has another type: expected `Content-Type: application/json`")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise ApiError(413, f"the body is larger than {_MOST_BYTES} bytes")
    except ClientDisconnect:
        raise ApiError(DISCONNECTED, "the connection was closed before the whole body had come") from None
    return bytes(body)


def as_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event(content: Any) -> bytes:
    return b"data: " + as_json(content) + b"\n\n"
