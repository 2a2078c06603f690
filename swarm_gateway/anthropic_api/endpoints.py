"""The paths of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Depends, Request, Response

from swarm_gateway.anthropic_api.formats import ANTHROPIC, MessageFormat
from swarm_gateway.anthropic_api.requests import CountRequest, MessagesRequest
from swarm_gateway.generation.beginning import ReceivedRequest, begin, read_request
from swarm_gateway.generation.generating import Delta
from swarm_gateway.generation.sampling import prompts_of
from swarm_gateway.limits.preparing import beside_streams
from swarm_gateway.web.http import ChunkedResponse, Gateway, as_json

ANTHROPIC_PREFIX = "/v1/messages"


def anthropic_router(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix=ANTHROPIC_PREFIX)

    @router.post("")
    async def answer(request: Request, key: str = Depends(gateway.admit)) -> Response:
        received = await read_request(gateway, MessagesRequest, request, key)
        return ChunkedResponse(_generated(received), is_stream=received.fields.stream, dialect=ANTHROPIC)

    @router.post("/count_tokens")
    async def count(request: Request, key: str = Depends(gateway.admit)) -> Response:
        received = await read_request(gateway, CountRequest, request, key)
        return ChunkedResponse(_counted(received), is_stream=False, dialect=ANTHROPIC)

    return router


async def _generated(received: ReceivedRequest[MessagesRequest]) -> AsyncGenerator[bytes, None]:
    work = await begin(received, await beside_streams(received.num_bytes, received.fields.as_chat))
    form = MessageFormat(work.model.name, work.num_prompt)
    async with aclosing(work.items()) as items:
        if not received.fields.stream:
            found = [item async for item in items if isinstance(item, Delta)]
            yield as_json(form.whole(found, work.num_generated))
            return
        async for item in items:
            if isinstance(item, Delta) and (events := list(form.events(item, work.num_generated))):
                yield b"".join(map(ANTHROPIC.chunk, events))


async def _counted(received: ReceivedRequest[CountRequest]) -> AsyncGenerator[bytes, None]:
    gateway, chat = received.gateway, await beside_streams(received.num_bytes, received.fields.as_chat)
    model = await gateway.models.get(chat.model)
    ((prompt, _),) = await gateway.preparations.run(received.key, received.num_bytes, lambda: prompts_of(chat, model))
    yield as_json({"input_tokens": len(prompt)})
