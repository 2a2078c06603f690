"""The paths of Anthropic's Messages API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Depends, Request, Response

from swarm_gateway.anthropic_api.formats import ANTHROPIC, MessageFormat
from swarm_gateway.anthropic_api.requests import CountRequest, MessagesRequest
from swarm_gateway.generation.beginning import begin, read_request
from swarm_gateway.generation.generating import Delta
from swarm_gateway.generation.sampling import prompts_of
from swarm_gateway.web.http import ChunkedResponse, Gateway, as_json

ANTHROPIC_PREFIX = "/v1/messages"


def anthropic_router(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix=ANTHROPIC_PREFIX)

    @router.post("")
    async def answer(request: Request, key: str = Depends(gateway.admit)) -> Response:
        began_s = time.perf_counter()
        asked, num_bytes = await read_request(gateway, MessagesRequest, request, key)
        chunks = _generated(gateway, asked, num_bytes, key, began_s)
        return ChunkedResponse(chunks, is_stream=asked.stream, dialect=ANTHROPIC)

    @router.post("/count_tokens")
    async def count(request: Request, key: str = Depends(gateway.admit)) -> Response:
        asked, num_bytes = await read_request(gateway, CountRequest, request, key)
        return ChunkedResponse(_counted(gateway, asked, num_bytes, key), is_stream=False, dialect=ANTHROPIC)

    return router


async def _generated(
    gateway: Gateway, asked: MessagesRequest, num_bytes: int, key: str, began_s: float
) -> AsyncGenerator[bytes, None]:
    work = await begin(gateway, asked.as_chat(), num_bytes, key, began_s)
    form = MessageFormat(work.model.name, work.num_prompt)
    async with aclosing(work.items()) as items:
        if not asked.stream:
            found = [item async for item in items if isinstance(item, Delta)]
            yield as_json(form.whole(found, work.num_generated))
            return
        async for item in items:
            if isinstance(item, Delta) and (events := list(form.events(item, work.num_generated))):
                yield b"".join(map(ANTHROPIC.chunk, events))


async def _counted(gateway: Gateway, asked: CountRequest, num_bytes: int, key: str) -> AsyncGenerator[bytes, None]:
    model, chat = await gateway.models.get(asked.model), asked.as_chat()
    (prompt,) = await gateway.preparations.run(key, num_bytes, lambda: prompts_of(chat, model))
    yield as_json({"input_tokens": len(prompt)})
