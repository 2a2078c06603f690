"""The paths of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from swarm_gateway.generation.beginning import begin
from swarm_gateway.generation.generating import Delta
from swarm_gateway.generation.requests import parse
from swarm_gateway.responses_api.formats import RESPONSES, ResponseWriter
from swarm_gateway.responses_api.requests import Item, ResponsesRequest, items_of
from swarm_gateway.responses_api.store import ResponseStore
from swarm_gateway.web.http import ChunkedResponse, Gateway, as_json, read_body


def responses_router(gateway: Gateway, store: ResponseStore) -> APIRouter:
    router = APIRouter(prefix="/v1/responses")

    @router.post("")
    async def respond(request: Request, key: str = Depends(gateway.admit)) -> Response:
        began_s = time.perf_counter()
        gateway.rate.count(key)
        body = await read_body(request)
        asked = parse(ResponsesRequest, body)
        chunks = _generated(gateway, store, asked, len(body), key, began_s)
        return ChunkedResponse(chunks, is_stream=asked.stream, dialect=RESPONSES)

    @router.get("/{response_id}")
    async def show(response_id: str, key: str = Depends(gateway.admit)) -> Response:
        return JSONResponse(await asyncio.to_thread(store.get, key, response_id))

    @router.get("/{response_id}/input_items")
    async def list_items(response_id: str, key: str = Depends(gateway.admit)) -> Response:
        items = await asyncio.to_thread(store.items, key, response_id)
        data = [item | {"id": f"item_{number}"} for number, item in reversed(list(enumerate(items)))]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return JSONResponse({"object": "list", "data": data, "has_more": False} | ends)

    @router.delete("/{response_id}")
    async def delete(response_id: str, key: str = Depends(gateway.admit)) -> Response:
        await asyncio.to_thread(store.delete, key, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


async def _generated(
    gateway: Gateway, store: ResponseStore, asked: ResponsesRequest, num_bytes: int, key: str, began_s: float
) -> AsyncGenerator[bytes, None]:
    before: list[Item] = []
    if asked.previous_response_id is not None:
        before = items_of(await asyncio.to_thread(store.conversation, key, asked.previous_response_id))
    work = await begin(gateway, asked.as_chat(before), num_bytes, key, began_s)
    form = ResponseWriter(asked, work.model.name, work.num_prompt)
    found: list[Delta] = []
    async with aclosing(work.items()) as items:
        async for item in items:
            if not isinstance(item, Delta):
                continue
            if asked.stream:
                events = (
                    list(form.events(item, work.num_generated)) if found else _begun(form, item, work.num_generated)
                )
                if item.finish is not None:
                    await _store(store, asked, key, form)
                yield b"".join(map(RESPONSES.chunk, events))
            found.append(item)
    if not asked.stream:
        whole = form.whole(found, work.num_generated)
        await _store(store, asked, key, form)
        yield as_json(whole)


def _begun(form: ResponseWriter, item: Delta, num_generated: int) -> list[dict[str, object]]:
    return [*form.begin(), *form.events(item, num_generated)]


async def _store(store: ResponseStore, asked: ResponsesRequest, key: str, form: ResponseWriter) -> None:
    if asked.store and form.final is not None:
        await asyncio.to_thread(store.add, key, form.final, asked.stored_input())
