"""Traces of requests: one span for each, the generation's phases below it, and nothing that a user wrote."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.unit.gateway.app.conftest import Gateway, Serve
from tests.unit.recorded import PARENT_ID, TRACE_ID, TRACEPARENT, Recorded, parent_id, recorded, span_id, trace_id

SECRET = "a secret of Ada"


@pytest.fixture
def found() -> Iterator[Recorded]:
    with recorded() as found:
        yield found


@pytest.fixture
def traced(serve: Serve, found: Recorded) -> Gateway:
    gateway = serve(telemetry=found.telemetry)
    gateway.says("return the list")
    return gateway


def complete(gateway: Gateway, **fields: object) -> httpx.Response:
    body = {"model": DEFAULT_MODEL, "prompt": SECRET, "max_tokens": 50, "stop": [SECRET]} | fields
    return httpx.post(f"{gateway.url}/v1/completions", json=body, headers={"traceparent": TRACEPARENT})


def test_a_completion(traced: Gateway, found: Recorded) -> None:
    usage = complete(traced, temperature=0.5, seed=7).json()["usage"]
    traced.stop()
    request, generation = found.span("POST /v1/completions"), found.span(f"text_completion {DEFAULT_MODEL}")
    assert (trace_id(request), parent_id(request)) == (TRACE_ID, PARENT_ID)
    attributes = dict(request.attributes or {})
    assert attributes["http.response.status_code"] == 200 and attributes["http.route"] == "/v1/completions"
    assert parent_id(generation) == span_id(request)
    assert dict(generation.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "swarm",
        "gen_ai.request.model": DEFAULT_MODEL,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.seed": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": ("stop",),
    }
    phases = [found.span(name) for name in ("queue", "prompt", "generation")]
    assert [parent_id(phase) for phase in phases] == [span_id(generation)] * 3
    for before, after in pairwise(phases):
        assert before.end_time is not None and after.start_time is not None and before.end_time <= after.start_time
    assert len(found.spans) == 5
    assert not [span for span in found.spans if SECRET in span.to_json()]


def test_choices_and_streams(traced: Gateway, found: Recorded) -> None:
    with httpx.stream(
        "POST", f"{traced.url}/v1/completions", json={"model": DEFAULT_MODEL, "prompt": "a", "n": 2, "stream": True}
    ) as answer:
        answer.read()
    traced.stop()
    request = found.span("POST /v1/completions")
    generations = [span for span in found.spans if span.name == f"text_completion {DEFAULT_MODEL}"]
    assert [parent_id(span) for span in generations] == [span_id(request)] * 2
    assert all(span.end_time <= request.end_time for span in generations)


def test_a_generation_that_fails_says_by_what_kind_of_error(traced: Gateway, found: Recorded) -> None:
    traced.batcher.refuses = ValueError(f"not with {SECRET}")
    assert complete(traced).status_code == 400
    traced.stop()
    generation = found.span(f"text_completion {DEFAULT_MODEL}")
    assert (generation.attributes or {})["error.type"] == "ValueError"
    assert not [span for span in found.spans if SECRET in span.to_json()]


def test_embeddings(traced: Gateway, found: Recorded) -> None:
    body = {"model": DEFAULT_MODEL, "input": ["one text", "two"]}
    usage = httpx.post(f"{traced.url}/v1/embeddings", json=body).json()["usage"]
    traced.stop()
    spans = [span for span in found.spans if span.name == f"embeddings {DEFAULT_MODEL}"]
    assert {parent_id(span) for span in spans} == {span_id(found.span("POST /v1/embeddings"))}
    assert sum((span.attributes or {})["gen_ai.usage.input_tokens"] for span in spans) == usage["prompt_tokens"]


def test_those_that_watch_leave_no_spans(traced: Gateway, found: Recorded) -> None:
    assert httpx.get(f"{traced.url}/health").status_code == httpx.get(f"{traced.url}/metrics").status_code == 200
    traced.stop()
    assert found.spans == []


def test_metrics_are_those_of_prometheus(traced: Gateway, found: Recorded) -> None:
    usage = complete(traced).json()["usage"]
    traced.stop()
    found.telemetry.close()
    (scope,) = found.metrics.kept[-1].resource_metrics[0].scope_metrics
    values = {metric.name: metric.data.data_points for metric in scope.metrics}
    (prompt,), (generated,) = values["swarm_prompt_tokens"], values["swarm_generated_tokens"]
    assert (prompt.value, generated.value) == (usage["prompt_tokens"], usage["completion_tokens"])
    (requests,) = values["swarm_requests"]
    assert dict(requests.attributes) == {"endpoint": "/v1/completions", "status": "200"} and requests.value == 1
    assert values["swarm_time_to_first_token_seconds"][0].count == 1
