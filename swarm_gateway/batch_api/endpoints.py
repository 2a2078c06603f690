"""The paths of OpenAI's files and batches."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from swarm_gateway.batch_api.requests import CreateBatch, read_lines
from swarm_gateway.batch_api.store import BatchStore
from swarm_gateway.batch_api.worker import BatchWorker
from swarm_gateway.generation.beginning import read_request
from swarm_gateway.limits.admission import ApiError
from swarm_gateway.web.database import owner_of
from swarm_gateway.web.http import Gateway, listing
from swarm_gateway.web.metrics import DISCONNECTED

MOST_FILE_BYTES = 64 * 2**20
_WINDOW_S = 86400
_MOST_LISTED = 100
_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


def batch_router(gateway: Gateway, worker: BatchWorker) -> APIRouter:
    router, store = APIRouter(prefix="/v1"), worker.store

    @router.post("/files")
    async def upload(request: Request, key: str = Depends(gateway.admit)) -> Response:
        await gateway.admission.count(key)
        name, purpose, content = await _uploaded(request)
        return JSONResponse(await asyncio.to_thread(store.add_file, key, name, purpose, content))

    @router.get("/files")
    async def list_files(
        purpose: str | None = None, after: str = "", limit: str = "100", key: str = Depends(gateway.admit)
    ) -> Response:
        return _listed(await asyncio.to_thread(store.files, key, purpose), after, limit)

    @router.get("/files/{file_id}")
    async def show_file(file_id: str, key: str = Depends(gateway.admit)) -> Response:
        return JSONResponse(await asyncio.to_thread(store.file, key, file_id))

    @router.get("/files/{file_id}/content")
    async def read_file(file_id: str, key: str = Depends(gateway.admit)) -> Response:
        content = await asyncio.to_thread(store.content, owner_of(key), file_id)
        return Response(content, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    @router.delete("/files/{file_id}")
    async def delete_file(file_id: str, key: str = Depends(gateway.admit)) -> Response:
        await asyncio.to_thread(store.delete_file, key, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @router.post("/batches")
    async def create(request: Request, key: str = Depends(gateway.admit)) -> Response:
        asked = (await read_request(gateway, CreateBatch, request, key)).fields
        entry = await asyncio.to_thread(_created, store, asked, key)
        worker.wake()
        return JSONResponse(entry)

    @router.get("/batches")
    async def list_batches(after: str = "", limit: str = "100", key: str = Depends(gateway.admit)) -> Response:
        return _listed(await asyncio.to_thread(store.batches, key), after, limit)

    @router.get("/batches/{batch_id}")
    async def show(batch_id: str, key: str = Depends(gateway.admit)) -> Response:
        return JSONResponse(await asyncio.to_thread(store.batch, key, batch_id))

    @router.post("/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, key: str = Depends(gateway.admit)) -> Response:
        entry = await asyncio.to_thread(store.batch, key, batch_id)
        if entry["status"] not in ("validating", "in_progress", "cancelling"):
            raise ApiError(409, f"the batch is {entry['status']}, and cannot be cancelled", param="batch_id")
        cancelling = {"status": "cancelling", "cancelling_at": int(time.time())}
        await asyncio.to_thread(store.change, batch_id, cancelling)
        worker.wake()
        return JSONResponse(entry | cancelling)

    return router


def _created(store: BatchStore, asked: CreateBatch, key: str) -> dict[str, Any]:
    """Store a batch, and return its entry. Raise ApiError if there is no such file of this key."""
    lines, errors = read_lines(store.content(owner_of(key), asked.input_file_id), asked.endpoint)
    now = int(time.time())
    entry: dict[str, Any] = {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        **asked.model_dump(),
        "status": "failed" if errors else "validating",
        "errors": {"object": "list", "data": errors} if errors else None,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + _WINDOW_S,
        "request_counts": {"total": 0 if errors else len(lines), "completed": 0, "failed": 0},
        **dict.fromkeys(_TIMES),
    }
    if errors:
        entry["failed_at"] = now
    store.add_batch(key, entry)
    return entry


def _listed(entries: Sequence[dict[str, Any]], after: str, limit: str) -> Response:
    """Return the entries after the one with the id ``after``, at most ``limit``. Raise ApiError if that is invalid."""
    # The length comes first: ``int`` refuses thousands of digits with an error of its own.
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= _MOST_LISTED:
        raise ApiError(400, f"limit is {limit[:20]!r}: expected 1 to {_MOST_LISTED}", param="limit")
    first = next((number for number, entry in enumerate(entries, 1) if entry["id"] == after), 0)
    data = entries[first : first + int(limit)]
    return listing(data, has_more=first + len(data) < len(entries))


async def _uploaded(request: Request) -> tuple[str, str, bytes]:
    """Return the name, the purpose and the content of the file in a form.

    Raise ApiError if the form is invalid or too large, or if it comes from the page of another site.
    """
    origin = request.headers.get("Origin")  # browsers say it; a form needs no consent of this server, as JSON does
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise ApiError(403, f"a page of {origin[:100]} may not send files")
    if not request.headers.get("Content-Type", "").startswith("multipart/form-data"):
        raise ApiError(415, "the body has another type: expected `multipart/form-data`")
    try:
        parser = MultiPartParser(Headers(scope=request.scope), _limited(request), max_files=1, max_fields=8)
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise ApiError(400, f"the form is invalid: {error}") from None
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "there is no file in the form", param="file")
        if purpose != "batch":
            raise ApiError(400, f"the purpose is {purpose!r}: expected 'batch'", param="purpose")
        return file.filename or "file", purpose, await file.read()
    finally:
        await form.close()


async def _limited(request: Request) -> AsyncGenerator[bytes, None]:
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > MOST_FILE_BYTES:
                raise ApiError(413, f"the file is larger than {MOST_FILE_BYTES} bytes", param="file")
            yield part
    except ClientDisconnect:
        raise ApiError(DISCONNECTED, "the connection was closed before the whole file had come") from None
