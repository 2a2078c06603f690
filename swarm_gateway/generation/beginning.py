"""The reading of requests and the beginning of their generations, which are the same for all APIs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel

from swarm_client.batching.request import Request as Generation
from swarm_gateway.answers.answer_reader import AnswerReader
from swarm_gateway.generation.conversation import answer_reader
from swarm_gateway.generation.generating import QueuedGenerations
from swarm_gateway.generation.requests import ChatRequest, CompletionRequest, parse
from swarm_gateway.generation.sampling import echoes_of, requests_of
from swarm_gateway.limits.preparing import beside_streams
from swarm_gateway.web.http import Gateway, read_body
from swarm_gateway.web.models import ServedModel

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class ReceivedRequest(Generic[R]):
    """A request that has come to an endpoint.

    Attributes:
        began_s: when the request came, by ``time.perf_counter``.
    """

    gateway: Gateway
    key: str
    fields: R
    num_bytes: int
    began_s: float


async def read_request(gateway: Gateway, kind: type[R], request: Request, key: str) -> ReceivedRequest[R]:
    """Count the request for its key, and read its body. Raise ApiError if it is refused."""
    began_s = time.perf_counter()
    await gateway.admission.count(key)
    body = await read_body(request)
    fields = await beside_streams(len(body), lambda: parse(kind, body))
    return ReceivedRequest(gateway, key, fields, len(body), began_s)


async def begin(received: ReceivedRequest[Any], asked: ChatRequest | CompletionRequest) -> QueuedGenerations:
    """Return the generations, with their places in the queue: iterate over ``items`` at once, which frees the places.

    ``asked`` says the same as the request in OpenAI's fields.

    Raises:
        ApiError: the model cannot do what the request asks for, or there is no place.
        SwarmError: the model cannot be loaded at present.
    """
    gateway = received.gateway
    model = await gateway.models.get(asked.model)
    # A body of 10 kB can ask for 262,144 generations. They are refused before they are prepared.
    gateway.admission.limits.check_count(asked.num_generations)
    requests, echoes, reader = await gateway.preparations.run(
        received.key, received.num_bytes, lambda: _prepared(asked, model)
    )
    num_prompt = sum(len(each.prompt) for each in requests[:: asked.n])  # the choices of a prompt count it once
    places = await gateway.admission.join(received.key, len(requests))
    gateway.metrics.prompt_tokens.inc(num_prompt)
    operation = "chat" if isinstance(asked, ChatRequest) else "text_completion"
    began_s = received.began_s
    return QueuedGenerations(
        model, requests, asked.stop, places, gateway.metrics, began_s, num_prompt, reader, echoes, operation
    )


def _prepared(
    asked: ChatRequest | CompletionRequest, model: ServedModel
) -> tuple[list[Generation], list[str], AnswerReader | None]:
    """Return the generations, what they echo, and a reader for an answer; raise ApiError as ``begin`` does."""
    requests, echoes = requests_of(asked, model), echoes_of(asked, model)
    return requests, echoes, answer_reader(asked, model, requests[0].prompt)
