"""The paths of Ollama's API."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from swarm_gateway.answers.capabilities import capabilities_of
from swarm_gateway.generation.beginning import ReceivedRequest, begin, read_request
from swarm_gateway.generation.generating import Delta
from swarm_gateway.generation.requests import EmbeddingRequest, validated
from swarm_gateway.generation.vectors import vectors_of, with_vectors
from swarm_gateway.limits.preparing import beside_streams
from swarm_gateway.ollama_api.formats import OLLAMA, AnswerFormat, tag
from swarm_gateway.ollama_api.requests import ChatCall, EmbedCall, GenerateCall, OldEmbedCall, ShowCall
from swarm_gateway.web.http import ChunkedResponse, Gateway, as_json

OLLAMA_PREFIX = "/api/"
_VERSION = "0.13.0"  # of the API that is spoken here; clients refuse versions that are too old for them


def ollama_router(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix="/api")

    def add(path: str, kind: type[ChatCall] | type[GenerateCall]) -> None:
        @router.post(path)
        async def answer(request: Request, key: str = Depends(gateway.admit)) -> Response:
            received: ReceivedRequest[ChatCall | GenerateCall] = await read_request(gateway, kind, request, key)
            return ChunkedResponse(_generated(received), is_stream=received.fields.stream, dialect=OLLAMA)

    add("/chat", ChatCall)
    add("/generate", GenerateCall)

    @router.post("/embed")
    async def embed(request: Request, key: str = Depends(gateway.admit)) -> Response:
        received = await read_request(gateway, EmbedCall, request, key)
        return ChunkedResponse(_embedded(received), is_stream=False, dialect=OLLAMA)

    @router.post("/embeddings")
    async def embed_one(request: Request, key: str = Depends(gateway.admit)) -> Response:
        received = await read_request(gateway, OldEmbedCall, request, key)
        return ChunkedResponse(_embedded_one(received), is_stream=False, dialect=OLLAMA)

    @router.post("/show")
    async def show(request: Request, key: str = Depends(gateway.admit)) -> Response:
        asked = (await read_request(gateway, ShowCall, request, key)).fields
        return ChunkedResponse(_shown(gateway, asked.model or asked.name), is_stream=False, dialect=OLLAMA)

    @router.get("/tags", dependencies=[Depends(gateway.admit)])
    async def list_models() -> Response:
        return JSONResponse({"models": [tag(name, gateway.created) for name in await gateway.models.names()]})

    @router.get("/version", dependencies=[Depends(gateway.admit)])
    async def version() -> Response:
        return JSONResponse({"version": _VERSION})

    return router


async def _generated(received: ReceivedRequest[ChatCall | GenerateCall]) -> AsyncGenerator[bytes, None]:
    asked, is_chat = received.fields, isinstance(received.fields, ChatCall)
    translated = await beside_streams(received.num_bytes, asked.as_openai)
    if translated is None:
        model = await received.gateway.models.get(asked.model)
        loaded = AnswerFormat(model.name, received.began_s, is_chat=is_chat).loaded()
        yield OLLAMA.chunk(loaded) if asked.stream else as_json(loaded)
        return
    work = await begin(received, translated)
    form = AnswerFormat(work.model.name, received.began_s, is_chat=is_chat)
    found: list[Delta] = []
    async with aclosing(work.items()) as items:
        async for item in items:
            if not isinstance(item, Delta):
                continue
            form.begin()
            if asked.stream:
                yield OLLAMA.chunk(form.chunk(item, work))
            else:
                found.append(item)
    if not asked.stream:
        yield as_json(form.whole(found, work))


async def _embedded(received: ReceivedRequest[EmbedCall]) -> AsyncGenerator[bytes, None]:
    texts = validated(EmbeddingRequest, {"model": received.fields.model, "input": received.fields.input})
    model, vectors, num_tokens = await vectors_of(received, texts)
    total = int((time.perf_counter() - received.began_s) * 1e9)
    rest = {"model": model.name, "total_duration": total, "load_duration": 0, "prompt_eval_count": num_tokens}
    yield await with_vectors(rest, "embeddings", map(_of_length_1, vectors))


async def _embedded_one(received: ReceivedRequest[OldEmbedCall]) -> AsyncGenerator[bytes, None]:
    texts = validated(EmbeddingRequest, {"model": received.fields.model, "input": received.fields.prompt})
    _, (vector,), _ = await vectors_of(received, texts)
    yield as_json({"embedding": vector})


def _of_length_1(vector: list[float]) -> list[float]:
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else vector


async def _shown(gateway: Gateway, name: str) -> AsyncGenerator[bytes, None]:
    model = await gateway.models.get(name)
    info = {"general.architecture": "swarm", "general.basename": model.name, "swarm.vocab_size": model.vocab_size}
    if model.max_positions is not None:
        info["swarm.context_length"] = model.max_positions
    entry = tag(model.name, gateway.created)
    yield as_json(
        {
            "modelfile": "",
            "parameters": "",
            "template": str(model.tokenizer.chat_template or ""),
            "details": entry["details"],
            "model_info": info,
            "capabilities": capabilities_of(model.tokenizer, sees=model.pictures is not None),
            "modified_at": entry["modified_at"],
        }
    )
