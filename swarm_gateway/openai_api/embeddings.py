"""The endpoint ``/v1/embeddings``: the mean of a text's last hidden states."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from swarm_gateway.generation.beginning import ReceivedRequest
from swarm_gateway.generation.requests import EmbeddingRequest
from swarm_gateway.generation.vectors import vectors_of, with_vectors


async def embeddings(received: ReceivedRequest[EmbeddingRequest]) -> AsyncGenerator[bytes, None]:
    """Yield the answer as JSON.

    Raise ApiError if the model cannot do what the request asks for, SwarmError if the swarm fails.
    """
    asked = received.fields
    model, vectors, num_tokens = await vectors_of(received, asked)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    entries = (
        {"object": "embedding", "index": index, "embedding": _written(vector, asked.encoding_format)}
        for index, vector in enumerate(vectors)
    )
    yield await with_vectors({"object": "list", "model": model.name, "usage": usage}, "data", entries)


def _written(vector: Sequence[float], encoding: str) -> Any:
    """Return the vector in the given encoding; ``base64`` encodes little-endian float32."""
    return vector if encoding == "float" else base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
