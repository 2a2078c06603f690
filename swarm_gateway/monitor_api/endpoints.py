"""The paths under ``/api/v1``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from swarm_client.core.config import ClientConfig
from swarm_gateway.history.recorder import HistoryRecorder, Observation
from swarm_gateway.history.store import KEPT_S
from swarm_gateway.limits.admission import ApiError
from swarm_gateway.monitor_api import flat
from swarm_gateway.monitor_api.joining import Invitation
from swarm_gateway.web.http import ChunkedResponse, Gateway, as_json, event

MONITOR_PREFIX = "/api/v1"
_MOST_EVENTS, _MOST_CONTRIBUTIONS = 1000, 1000
_MOST_SAMPLES = 1500  # an automatic resolution gives no more samples
_HOUR_S = 3600.0
_SILENCE_S = 15.0  # after this silence a tick is sent, because proxies close silent connections
_NO_STORE = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class Monitored:
    """The swarm that the API shows.

    Attributes:
        own_model: the model that the gateway was started for, by its name in records.
        own_is_directory: whether that model is in a directory, not on the hub.
        is_private: whether only members may join.
    """

    recorder: HistoryRecorder
    config: ClientConfig
    own_model: str
    is_private: bool = False
    own_is_directory: bool = False


def monitor_router(gateway: Gateway, monitored: Monitored) -> APIRouter:
    router, recorder = APIRouter(prefix=MONITOR_PREFIX), monitored.recorder
    admitted = [Depends(gateway.admit)]

    def invitation(seen: Observation) -> Invitation:
        return Invitation.of(monitored.config, seen.peers, monitored.is_private)

    @router.get("/swarm", dependencies=admitted)
    async def swarm() -> Response:
        seen, queues = recorder.latest, await gateway.admission.load()
        load = {"generations_active": queues.num_active, "generations_queued": queues.num_queued}
        own, is_directory = monitored.own_model, monitored.own_is_directory
        return _json(flat.swarm_json(seen, invitation(seen), own, load, own_is_directory=is_directory))

    @router.get("/servers", dependencies=admitted)
    async def servers() -> Response:
        seen = recorder.latest
        servers = [flat.server_json(seen, status, server) for status in seen.models for server in status.servers]
        return _json({"time": seen.time, "servers": servers})

    @router.get("/models", dependencies=admitted)
    async def models() -> Response:
        seen = recorder.latest
        invited = invitation(seen)
        return _json({"time": seen.time, "models": [flat.model_json(seen, each, invited) for each in seen.models]})

    @router.get("/contributions", dependencies=admitted)
    async def contributions() -> Response:
        seen = recorder.latest
        return _json({"time": seen.time, "contributions": flat.contributions_json(seen, _MOST_CONTRIBUTIONS)})

    @router.get("/history", dependencies=admitted)
    async def history(request: Request) -> Response:
        seen = recorder.latest
        since = _number(request, "since", -_HOUR_S)
        since = since if since >= 0 else seen.time + since
        resolution = _resolution(request, seen.time, since)
        samples = await asyncio.to_thread(recorder.samples, resolution, since)
        found = [{"time": time, **vars(sample)} for time, sample in samples]
        return _json({"resolution_s": resolution, "samples": found})

    @router.get("/events", dependencies=admitted)
    async def events(request: Request) -> Response:
        return await _events(request, recorder)

    @router.get("/health")
    async def health(request: Request) -> Response:
        """Return the health to everybody who can reach this server, but the reasons only to admitted requests."""
        status, reasons = flat.health_of(recorder.latest, monitored.own_model)
        content: dict[str, Any] = {"status": status}
        with contextlib.suppress(ApiError):
            gateway.admit(request)
            content["reasons"] = reasons
        return _json(content, 503 if status == flat.DOWN else 200)

    return router


def _json(content: Any, status: int = 200) -> Response:
    return JSONResponse(content, status, _NO_STORE)


async def _events(request: Request, recorder: HistoryRecorder) -> Response:
    """Return a stream of the events after the one that the request names, or a list if the request accepts JSON."""
    is_stream = "application/json" not in request.headers.get("Accept", "")
    last = recorder.latest.last_event_id
    after = int(_number(request, "after", float(last) if is_stream else 0.0))
    # A browser that reconnects sends this header with the id of the last event that it has received.
    if is_stream and (resumed := request.headers.get("Last-Event-ID", "")):
        after = int(resumed) if resumed.isdecimal() and len(resumed) < 20 else last
    after = min(max(after, 0), last)  # a larger id is from a history that is gone
    if is_stream:
        return ChunkedResponse(_stream(recorder, after), is_stream=True)
    most = int(min(max(_number(request, "limit", 100.0), 1), _MOST_EVENTS))
    found = await asyncio.to_thread(recorder.events, after, most)
    return _json({"last_id": last, "events": [flat.event_json(each) for each in found]})


async def _stream(recorder: HistoryRecorder, after: int) -> AsyncGenerator[bytes, None]:
    """Yield events as they are seen. Yield a ``tick`` after each look at the swarm, and after a silence."""
    loop, looked = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the server has just ended
            loop.call_soon_threadsafe(looked.set)

    stop = recorder.listen(wake)
    try:
        while True:
            looked.clear()  # before reading, so that a look during it is not missed
            for stored in await asyncio.to_thread(recorder.events, after, _MOST_EVENTS):
                after = stored.id
                yield f"id: {stored.id}\n".encode() + event(flat.event_json(stored))
            yield b"event: tick\ndata: " + as_json({"time": recorder.latest.time}) + b"\n\n"
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await looked.wait()
            except TimeoutError:
                continue
    finally:
        stop()


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) < 2**53:  # not ``>=``, which is False for NaN
        raise ApiError(400, f"{name} is {text[:40]!r}: expected a number", param=name)
    return number


def _resolution(request: Request, now: float, since: float) -> int:
    """Return the requested resolution in seconds.

    By default, this is the finest resolution whose samples reach back to ``since`` and are not too many.
    """
    text = request.query_params.get("resolution", "auto")
    if text == "auto":
        span_s = now - since
        fitting = [each for each, kept_s in KEPT_S.items() if span_s <= min(kept_s, each * _MOST_SAMPLES)]
        return min(fitting, default=max(KEPT_S))
    if not text.isdecimal() or len(text) > 5 or int(text) not in KEPT_S:
        known = ", ".join(map(str, KEPT_S))
        raise ApiError(400, f"resolution is {text[:40]!r}: expected auto or one of {known} seconds", param="resolution")
    return int(text)
