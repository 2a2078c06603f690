"""Requests for batches, and the requests in the lines of a batch's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from swarm_gateway.generation.parts import Fields, Values
from swarm_gateway.generation.requests import ChatRequest, CompletionRequest, EmbeddingRequest, parse, validated
from swarm_gateway.limits.admission import ApiError

KINDS: Mapping[str, type[ChatRequest] | type[CompletionRequest] | type[EmbeddingRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
MOST_LINES = 50_000  # OpenAI's limit
_MOST_ERRORS = 100  # reported for one file
_CREATE: dict[str, Values] = {"output_expires_after": None}


class CreateBatch(Fields):
    UNSUPPORTED = _CREATE
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    # OpenAI's limits. Batches cannot be deleted, and do not count among the bytes that a store may take.
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        default={}, max_length=16
    )


class _Line(Fields):
    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch; ``number`` is that of its line, from 1, and ``num_bytes`` the line's size."""

    number: int
    custom_id: str
    asked: ChatRequest | CompletionRequest | EmbeddingRequest
    num_bytes: int


def read_lines(content: bytes, endpoint: str) -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """Return the requests in a file, and why lines are no requests, as a batch's ``errors`` say it."""
    found: list[BatchLine] = []
    errors: list[dict[str, Any]] = []
    names: set[str] = set()
    for number, text in enumerate(content.split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            line = _read_line(number, text, endpoint)
            if line.custom_id in names:
                raise ApiError(400, f"another line has the custom_id {line.custom_id!r} too", param="custom_id")
        except ApiError as error:
            told = error.body["error"]
            code = told["code"] or "invalid_request"
            errors.append({"code": code, "message": told["message"], "param": told["param"], "line": number})
            if len(errors) == _MOST_ERRORS:
                break
        else:
            names.add(line.custom_id)
            found.append(line)
    if not found and not errors:
        errors.append({"code": "empty_file", "message": "the file has no requests", "param": None, "line": None})
    if len(found) > MOST_LINES:
        message = f"the file has {len(found)} requests: expected at most {MOST_LINES}"
        errors.append({"code": "too_many_requests", "message": message, "param": None, "line": None})
    return found, errors


def _read_line(number: int, text: bytes, endpoint: str) -> BatchLine:
    """Return the request in a line. Raise ApiError if there is none for this endpoint."""
    line = parse(_Line, text, "the line")
    if line.url != endpoint:
        raise ApiError(400, f"the url is {line.url}: expected that of the batch, {endpoint}", param="url")
    asked = validated(KINDS[endpoint], line.body)
    if getattr(asked, "stream", False):
        raise ApiError(400, "answers in a batch are no streams: leave stream out", param="body.stream")
    if not isinstance(asked, EmbeddingRequest):
        asked = asked.model_copy(update={"service_tier": "flex"})
    return BatchLine(number, line.custom_id, asked, len(text))
