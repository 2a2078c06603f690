"""The parts that all endpoints share: admission, bodies, streamed answers, and refusals."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from swarm_gateway.limits.admission import ApiError, RequestAdmission, check_key
from swarm_gateway.limits.preparing import Preparations
from swarm_gateway.web.metrics import DISCONNECTED, Metrics
from swarm_gateway.web.models import SwarmModels
from swarm_protocol.errors import RequestRejected, SwarmError
from swarm_protocol.failures import any_error_as
from swarm_protocol.net.hosts import called_host, is_loopback_host
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.wire.printable import printable

_logger = logging.getLogger(__name__)
_MOST_BYTES = 8 * 2**20  # of a request
EVENT_STREAM = "text/event-stream"
_MOST_SILENCE_S = 15.0  # of a stream; proxies and clients give up after a minute, and some after less
_AS_IT_COMES = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must pass on each chunk at once


@dataclass(frozen=True)
class Gateway:
    """The state that the endpoints of one server share.

    Attributes:
        keys: the API keys that are accepted. Without keys, a request must name this machine's loopback as its host,
            which keeps out pages that a browser has loaded from other sites.
    """

    models: SwarmModels
    admission: RequestAdmission
    preparations: Preparations
    metrics: Metrics
    keys: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def admit(self, request: Request) -> str:
        """Return the request's key, for ``Depends``. Raise ApiError if the request may not be answered."""
        if self.keys:
            key = request.headers.get("X-Api-Key")  # from clients of Anthropic's API
            header = request.headers.get("Authorization", None if key is None else f"Bearer {key}")
            return check_key(self.keys, header)
        # Not ``request.url``: it has the address of the socket if the header is malformed.
        if not is_loopback_host(host := called_host(request.headers.getlist("Host"))):
            raise ApiError(403, f"{printable(host)!r} is no name of this machine's loopback")
        return ""


@dataclass(frozen=True)
class Dialect:
    """The shapes of one API that do not depend on the request.

    Attributes:
        stream_type: the media type of streams.
        chunk: a function from the content of a stream's chunk to its bytes.
        error: a function from an error to the content of its answer, or of the last chunk of a stream.
        idle: a chunk that says nothing, for a stream that has been silent for long; empty if the API has none.
    """

    stream_type: str
    chunk: Callable[[Any], bytes]
    error: Callable[[ApiError], Any]
    idle: bytes = b""


class ChunkedResponse(Response):
    """A response that sends chunks as they come. It cancels their generator once the client has gone.

    An error before the response has begun has its own HTTP status. A later error is the last event of the stream. A
    stream begins with its first chunk, or with an idle chunk if the first one takes long.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], *, is_stream: bool, dialect: Dialect | None = None) -> None:
        """Prepare the headers. ``is_stream``: whether the chunks form a stream; ``dialect``: OpenAI's by default."""
        self._dialect = dialect or OPENAI
        super().__init__(
            media_type=self._dialect.stream_type if is_stream else "application/json", headers=_AS_IT_COMES
        )
        del self.headers["content-length"]  # it counts an empty body
        self._chunks = chunks
        self._idle = self._dialect.idle if is_stream else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(send, self.raw_headers)
        idling = [asyncio.create_task(body.keep_alive(self._idle))] if self._idle else []
        try:
            error = await self._write_all(body)
        finally:  # before the end of the response, after which nothing may be written
            await end_tasks(idling)
        if error is not None and not body.has_begun:
            return await refusal(error, self._dialect)(scope, receive, send)
        if error is not None:
            await body.write(self._dialect.chunk(self._dialect.error(error)))
        await send({"type": "http.response.body", "body": b""})

    async def _write_all(self, body: _Body) -> ApiError | None:
        """Write all chunks. Return the error that ended them, if there was one, because the client is to read it."""
        async with aclosing(self._chunks) as chunks:
            try:
                with any_error_as(as_api_error):
                    async for chunk in chunks:
                        await body.write(chunk)
            except ApiError as error:
                return error
        return None


class _Body:
    """The body of one response."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._start = {"type": "http.response.start", "status": 200, "headers": headers}
        self.has_begun = False
        self._sending = asyncio.Lock()
        self._written_s = asyncio.get_running_loop().time()

    async def write(self, chunk: bytes) -> None:
        async with self._sending:  # chunks and idle chunks come from two tasks
            if not self.has_begun:
                await self._send(self._start)
                self.has_begun = True
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._written_s = asyncio.get_running_loop().time()

    async def keep_alive(self, idle: bytes) -> None:
        """Write ``idle`` whenever nothing has been written for ``_MOST_SILENCE_S``."""
        while True:
            left_s = self._written_s + _MOST_SILENCE_S - asyncio.get_running_loop().time()
            await asyncio.sleep(left_s)
            if left_s <= 0:  # otherwise chunks may have been written during the sleep
                await self.write(idle)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work of a request whose body has been read. Cancel the work at once if the client disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        await end_tasks([working, leaving])


def as_api_error(error: Exception) -> ApiError:
    """Return the error for the response, and log it if the fault is in this server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SwarmError) and not isinstance(error, RequestRejected):
        return ApiError(503, str(error), code="swarm_error")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    _logger.error("a request failed", exc_info=error)
    return ApiError(500, "this server has failed; its log says why", code="internal_error")


def refusal(error: ApiError, dialect: Dialect | None = None) -> JSONResponse:
    return JSONResponse((dialect or OPENAI).error(error), error.status, error.headers)


async def read_body(request: Request) -> bytes:
    """Return the whole body.

    Raise ApiError if the body is too large, if the client disconnects, or if its type is not JSON. Forms on pages of
    other sites cannot send this type.
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


def as_date(seconds: float) -> str:
    """Return the time, given in seconds since 1970, in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def listing(data: Sequence[dict[str, Any]], *, has_more: bool = False) -> Response:
    """Return a response with a page of OpenAI's objects; ``has_more``: more objects follow on the next page."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return JSONResponse({"object": "list", "data": data, "has_more": has_more} | ends)


def event(content: Any) -> bytes:
    return b"data: " + as_json(content) + b"\n\n"


COMMENT = b": waiting\n\n"  # of an event stream; clients skip it
OPENAI = Dialect(EVENT_STREAM, event, lambda error: error.body, COMMENT)
