"""The vectors of texts: the mean of a model's last hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from swarm_gateway.generation.beginning import ReceivedRequest
from swarm_gateway.generation.generation_trace import request_attributes
from swarm_gateway.generation.requests import EmbeddingRequest
from swarm_gateway.limits.admission import ApiError, QueuePlace
from swarm_gateway.web.http import as_json
from swarm_gateway.web.models import ServedModel
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.telemetry.tracing import tracing

_MOST_TOKENS = 1 << 18  # of all inputs of one request
_TOGETHER = 4  # inputs of one request at the same time, each with a place in the queue


async def vectors_of(
    received: ReceivedRequest[Any], asked: EmbeddingRequest
) -> tuple[ServedModel, list[list[float]], int]:
    """Return the model, the vector of each input, and the number of tokens. ``asked`` says the same as the request.

    Raise ApiError if the model cannot do what the request asks for, SwarmError if the swarm fails.
    """
    gateway, key = received.gateway, received.key
    model = await gateway.models.get(asked.model)
    inputs = await gateway.preparations.run(key, received.num_bytes, lambda: _tokens_of(asked, model))
    num_tokens = sum(map(len, inputs))
    vectors: list[list[float]] = [[] for _ in inputs]
    places = await gateway.admission.join(key, min(_TOGETHER, len(inputs)))
    numbered = enumerate(inputs)  # the tasks share this iterator, which gives each input to one of them
    tasks = [asyncio.create_task(_embed(model, place, numbered, vectors)) for place in places]
    gateway.metrics.prompt_tokens.inc(num_tokens)
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)
        for place in places:
            place.leave()
    return model, vectors, num_tokens


async def with_vectors(rest: dict[str, Any], name: str, entries: Iterable[Any]) -> bytes:
    """Return the JSON of an answer: the fields ``rest``, and the field ``name`` with an entry for each vector."""
    written = []
    for entry in entries:
        await asyncio.sleep(0)  # lets other streams go on, because the numbers of a large request take seconds
        written.append(as_json(entry))
    return as_json(rest)[:-1] + f',"{name}":['.encode() + b",".join(written) + b"]}"


async def _embed(
    model: ServedModel, place: QueuePlace, numbered: Iterator[tuple[int, Sequence[int]]], vectors: list[list[float]]
) -> None:
    """Take inputs and store their vectors until no inputs are left."""
    async with place:
        for index, token_ids in numbered:
            attributes = request_attributes("embeddings", model.name, len(token_ids))
            with tracing().span(f"embeddings {model.name}", attributes):
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
    model.check_tokens(token_ids, "input")
    if model.max_positions is not None and len(token_ids) > model.max_positions:
        message = f"input {number} has {len(token_ids)} tokens: the model has {model.max_positions} positions"
        raise ApiError(400, message, param="input", code="context_length_exceeded")
