"""The paths of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from swarm_gateway.generation.beginning import ReceivedRequest, begin, read_request
from swarm_gateway.generation.generating import Delta
from swarm_gateway.limits.preparing import beside_streams
from swarm_gateway.responses_api.formats import RESPONSES, ResponseWriter
from swarm_gateway.responses_api.requests import Item, ResponsesRequest, items_of
from swarm_gateway.responses_api.store import ResponseStore
from swarm_gateway.web.http import ChunkedResponse, Gateway, as_json, listing

_logger = logging.getLogger(__name__)


def responses_router(gateway: Gateway, store: ResponseStore) -> APIRouter:
    router = APIRouter(prefix="/v1/responses")

    @router.post("")
    async def respond(request: Request, key: str = Depends(gateway.admit)) -> Response:
        received = await read_request(gateway, ResponsesRequest, request, key)
        return ChunkedResponse(_generated(store, received), is_stream=received.fields.stream, dialect=RESPONSES)

    @router.get("/{response_id}")
    async def show(response_id: str, key: str = Depends(gateway.admit)) -> Response:
        return JSONResponse(await asyncio.to_thread(store.get, key, response_id))

    @router.get("/{response_id}/input_items")
    async def list_items(response_id: str, key: str = Depends(gateway.admit)) -> Response:
        items = await asyncio.to_thread(store.items, key, response_id)
        data = [item | {"id": f"item_{number}"} for number, item in reversed(list(enumerate(items)))]
        return listing(data)

    @router.delete("/{response_id}")
    async def delete(response_id: str, key: str = Depends(gateway.admit)) -> Response:
        await asyncio.to_thread(store.delete, key, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


async def _generated(store: ResponseStore, received: ReceivedRequest[ResponsesRequest]) -> AsyncGenerator[bytes, None]:
    asked, key = received.fields, received.key
    before: list[Item] = []
    if asked.previous_response_id is not None:
        stored, num_bytes = await asyncio.to_thread(store.conversation, key, asked.previous_response_id)
        before = await asyncio.to_thread(items_of, stored)
        # What came before is prepared too, so a short request with a long history takes its turn as a long one.
        received = replace(received, num_bytes=received.num_bytes + num_bytes)
    work = await begin(received, await beside_streams(received.num_bytes, lambda: asked.as_chat(before)))
    form = ResponseWriter(asked, work.model.name, work.num_prompt)
    async with aclosing(work.items()) as items:
        async for item in items:
            if not isinstance(item, Delta):
                continue
            events = list(form.events(item, work.num_generated, work.num_reasoning))
            if form.final is not None and asked.store:
                try:
                    await asyncio.to_thread(store.add, key, form.final, asked.stored_input())
                except sqlite3.Error as error:  # such as a full disk; the client still gets the response
                    _logger.warning("a response could not be stored, so that no other can go on from it: %s", error)
            if asked.stream and events:
                yield b"".join(map(RESPONSES.chunk, events))
    if not asked.stream:
        yield as_json(form.final)
