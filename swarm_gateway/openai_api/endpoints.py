"""The paths under ``/v1``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from swarm_gateway.generation.beginning import ReceivedRequest, begin, read_request
from swarm_gateway.generation.generating import Delta
from swarm_gateway.generation.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from swarm_gateway.openai_api.embeddings import embeddings
from swarm_gateway.openai_api.formats import ChatFormat, CompletionFormat, TokenTexts, usage
from swarm_gateway.web.http import ChunkedResponse, Gateway, as_date, as_json, event, listing
from swarm_gateway.web.models import not_found

_DONE = b"data: [DONE]\n\n"


def openai_router(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix="/v1")

    def add(path: str, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
        @router.post(path)
        async def answer(request: Request, key: str = Depends(gateway.admit)) -> Response:
            received: ReceivedRequest[ChatRequest | CompletionRequest]
            received = await read_request(gateway, kind, request, key)
            return ChunkedResponse(answer_chunks(received), is_stream=received.fields.stream)

    add("/chat/completions", ChatRequest)
    add("/completions", CompletionRequest)

    @router.post("/embeddings")
    async def embed(request: Request, key: str = Depends(gateway.admit)) -> Response:
        received = await read_request(gateway, EmbeddingRequest, request, key)
        return ChunkedResponse(embeddings(received), is_stream=False)

    async def described(name: str, *, wait: bool) -> dict[str, Any]:
        """Return a model's entry, with the fields of OpenAI's and of Anthropic's API, which have one path for this.

        Without ``wait``, an entry lacks what takes long to find out.
        """
        own = {"id": name, "object": "model", "created": gateway.created, "owned_by": "swarm"}
        own |= {"type": "model", "display_name": name, "created_at": as_date(gateway.created)}
        traits = await gateway.models.traits(name, wait=wait)
        if traits is not None:
            own |= {"chat_template": traits.has_template, "capabilities": list(traits.capabilities)}
            if traits.max_positions is not None:
                own |= {"context_length": traits.max_positions, "max_model_len": traits.max_positions}
        return own

    @router.get("/models", dependencies=[Depends(gateway.admit)])
    async def list_models() -> Response:
        data = [await described(name, wait=False) for name in await gateway.models.names()]
        return listing(data)

    @router.get("/models/{name:path}", dependencies=[Depends(gateway.admit)])
    async def show_model(name: str) -> Response:
        if name not in await gateway.models.names():
            raise not_found(name)
        return JSONResponse({"chat_template": None} | await described(name, wait=True))

    return router


async def answer_chunks(
    received: ReceivedRequest[ChatRequest | CompletionRequest],
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as one JSON object, or as the events of a stream.

    Raise ApiError if the model cannot do what the request asks for, SwarmError if the swarm fails.
    """
    asked, options = received.fields, received.fields.streamed
    work = await begin(received, asked)
    texts = None if asked.num_logprobs is None else TokenTexts(work.model.tokenizer)
    form = (ChatFormat if isinstance(asked, ChatRequest) else CompletionFormat)(work.model.name, texts)
    async with aclosing(work.items()) as items:
        if not asked.stream:
            found = [item async for item in items if isinstance(item, Delta)]
            yield as_json(form.whole(found, len(work.requests), usage(work)))
            return
        async for item in items:
            so_far = {"usage": usage(work)} if options.include_usage and options.continuous_usage_stats else {}
            yield event(form.chunk(item) | so_far)
    if options.include_usage:
        yield event(form.last_chunk(usage(work)))
    yield _DONE
