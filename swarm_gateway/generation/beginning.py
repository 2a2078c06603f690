"""The reading of requests and the beginning of their generations, which are the same for all APIs."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from swarm_gateway.generation.conversation import answer_reader
from swarm_gateway.generation.generating import QueuedGenerations
from swarm_gateway.generation.requests import ChatRequest, CompletionRequest, parse
from swarm_gateway.generation.sampling import echoes_of, requests_of
from swarm_gateway.web.http import Gateway, read_body

R = TypeVar("R", bound=BaseModel)


async def read_request(gateway: Gateway, kind: type[R], request: Request, key: str) -> tuple[R, int]:
    """Count the request for its key. Return its fields and the size of its body in bytes. Raise ApiError if refused."""
    gateway.rate.count(key)
    body = await read_body(request)
    return parse(kind, body), len(body)


async def begin(
    gateway: Gateway, asked: ChatRequest | CompletionRequest, num_bytes: int, key: str, began_s: float
) -> QueuedGenerations:
    """Return the generations, with their places in the queue: iterate over ``items`` at once, which frees the places.

    Args:
        num_bytes: the size of the request's body.
        began_s: when the request came, by ``time.perf_counter``.

    Raises:
        ApiError: the model cannot do what the request asks for, or there is no place.
        SwarmError: the model cannot be loaded at present.
    """
    model = await gateway.models.get(asked.model)
    requests, echoes = await gateway.preparations.run(
        key, num_bytes, lambda: (requests_of(asked, model), echoes_of(asked, model))
    )
    new_reader = partial(answer_reader, asked, model, requests[0].prompt)
    new_reader()  # an unknown format is refused before a place is taken
    num_prompt = sum(len(each.prompt) for each in requests[:: asked.n])
    places = gateway.queue.join(key, len(requests))
    gateway.metrics.prompt_tokens.inc(num_prompt)
    operation = "chat" if isinstance(asked, ChatRequest) else "text_completion"
    return QueuedGenerations(
        model, requests, asked.stop, places, gateway.metrics, began_s, num_prompt, new_reader, echoes, operation
    )
