"""The endpoint ``/v1/embeddings``: the mean of a text's last hidden states."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np

from swarm_gateway.limits.admission import ApiError, QueuePlace
from swarm_gateway.openai_api.requests import EmbeddingRequest
from swarm_gateway.web.http import Gateway, as_json
from swarm_gateway.web.models import ServedModel
from swarm_protocol.process.routine import end_tasks

_MOST_TOKENS = 1 << 18  # of all inputs of one request
_TOGETHER = 4  # inputs of one request at the same time, each with a place in the queue


async def embeddings(
    gateway: Gateway, asked: EmbeddingRequest, num_bytes: int, key: str
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as JSON; ``num_bytes`` is the size of the request's body.

    Raise ApiError if the model cannot do what the request asks for, SwarmError if the swarm fails.
    """
    model = await gateway.models.get(asked.model)
    inputs = await gateway.preparations.run(key, num_bytes, lambda: _tokens_of(asked, model))
    num_tokens = sum(map(len, inputs))
    vectors: list[list[float]] = [[] for _ in inputs]
    places = gateway.queue.join(key, min(_TOGETHER, len(inputs)))
    numbered = enumerate(inputs)
    tasks = [asyncio.create_task(_embed(model, place, numbered, vectors)) for place in places]
    gateway.metrics.prompt_tokens.inc(num_tokens)
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)
        for place in places:
            place.leave()
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    data = []
    for index, vector in enumerate(vectors):
        await asyncio.sleep(0)  # lets other streams go on, because the numbers of a large request take seconds
        written = _written(vector, asked.encoding_format)
        data.append(as_json({"object": "embedding", "index": index, "embedding": written}))
    rest = as_json({"object": "list", "model": model.name, "usage": usage})
    yield rest[:-1] + b',"data":[' + b",".join(data) + b"]}"


async def _embed(
    model: ServedModel, place: QueuePlace, numbered: Iterator[tuple[int, Sequence[int]]], vectors: list[list[float]]
) -> None:
    """Take inputs and store their vectors until no inputs are left."""
    async with place:
        for index, token_ids in numbered:
            vectors[index] = await model.embed(token_ids)


def _tokens_of(asked: EmbeddingRequest, model: ServedModel) -> list[list[int]]:
    for each in asked.input:
        if isinstance(each, str):
            model.check_length(each, "input")
    inputs = [list(model.tokenizer(each).input_ids) if isinstance(each, str) else each for each in asked.input]
    for number, token_ids in enumerate(inputs):
        if not token_ids or asked.input[number] == "":  # an empty text may have a begin token
            raise ApiError(400, f"input {number} has no tokens: expected some text", param="input")
        _check_tokens(number, token_ids, model)
    if sum(map(len, inputs)) > _MOST_TOKENS:
        message = f"input has {sum(map(len, inputs))} tokens: expected at most {_MOST_TOKENS} in one request"
        raise ApiError(400, message, param="input")
    return inputs


def _check_tokens(number: int, token_ids: Sequence[int], model: ServedModel) -> None:
    """Raise ApiError if the model does not know a token of this input, or has too few positions."""
    if any(not 0 <= token < model.vocab_size for token in token_ids):
        raise ApiError(400, f"input: the model's token ids are below {model.vocab_size}", param="input")
    if model.max_positions is not None and len(token_ids) > model.max_positions:
        message = f"input {number} has {len(token_ids)} tokens: the model has {model.max_positions} positions"
        raise ApiError(400, message, param="input", code="context_length_exceeded")


def _written(vector: Sequence[float], encoding: str) -> Any:
    """Return the vector in the given encoding; ``base64`` encodes little-endian float32."""
    return vector if encoding == "float" else base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
