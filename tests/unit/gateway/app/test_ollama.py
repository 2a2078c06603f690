"""Ollama's API, as its official client speaks it."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import ollama
import pytest

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.errors import NoSwarm
from tests.unit.gateway.app.conftest import WAIT_S, Gateway, RandomBatcher, Serve
from tests.unit.gateway.app.tool_families import CALLS, TOOLS

ASK: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Sort"}]}


def client(gateway: Gateway, **options: Any) -> ollama.Client:
    return ollama.Client(gateway.url, timeout=WAIT_S, **options)


def test_a_conversation_whole_and_in_lines(gateway: Gateway) -> None:
    gateway.says("a list of words")
    whole = client(gateway).chat(**ASK)
    assert (whole.message.role, whole.message.content) == ("assistant", "a list of words")
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.prompt_eval_count == len(gateway.batcher.generations[0].request.prompt)
    assert whole.eval_count == len(gateway.batcher.says) and whole.total_duration >= whole.eval_duration >= 0
    parts = list(client(gateway).chat(**ASK, stream=True))
    assert "".join(part.message.content for part in parts) == "a list of words"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count and parts[-1].created_at.endswith("Z")


def test_a_prompt_with_and_without_the_template(caller: Gateway) -> None:
    caller.says("a list")
    assert client(caller).generate(DEFAULT_MODEL, "Sort", system="Be brief.").response == "a list"
    assert caller.prompt.startswith("system: Be brief.\nuser: Sort\n")
    parts = client(caller).generate(DEFAULT_MODEL, "Return", raw=True, stream=True)
    assert "".join(part.response for part in parts) == "a list" and caller.prompt.endswith("Return")
    assert "user:" not in caller.prompt
    loaded = client(caller).generate(DEFAULT_MODEL)
    assert loaded.done and loaded.done_reason == "load" and loaded.response == ""


def test_options(gateway: Gateway) -> None:
    gateway.says("one two three")
    options = {"num_predict": 7, "stop": [" two"], "seed": 3, "temperature": 0.5, "top_k": 9, "num_ctx": 4096}
    answer = client(gateway).chat(**ASK, options=options, keep_alive="5m", think=False)
    assert (answer.message.content, answer.done_reason) == ("one", "stop")
    request = gateway.batcher.generations[-1].request
    config = request.config
    assert (request.seed, config.max_new_tokens, config.temperature, config.top_k) == (3, 7, 0.5, 9)
    assert client(gateway).chat(**ASK, options={"num_predict": 1}).done_reason == "length"
    client(gateway).chat(**ASK, options={"num_predict": -1})
    request = gateway.batcher.generations[-1].request
    assert request.config.max_new_tokens == 1024 - len(request.prompt)


def test_an_answer_that_follows_a_schema_has_no_other_properties(serve: Serve, tokenizer: Any) -> None:
    gateway = serve(batcher=RandomBatcher(len(tokenizer)))
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    for seed in range(2):
        answer = client(gateway).chat(**ASK, format=schema, options={"seed": seed, "num_predict": 500})
        assert answer.done_reason == "length" or list(json.loads(answer.message.content)) == ["age"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(caller: Gateway, stream: bool) -> None:
    caller.says(CALLS["qwen"])
    answer = client(caller).chat(**ASK, tools=TOOLS, stream=stream)
    messages = [part.message for part in answer] if stream else [answer.message]
    calls = [call.function for message in messages for call in message.tool_calls or []]
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1, "b": "é"}), ("look", {})]
    assert 'user: Sort\nadd {"type": "object"' in caller.prompt  # the client orders and trims the schema


def test_results_belong_to_their_calls(caller: Gateway) -> None:
    caller.says("3")
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "look", "arguments": {}}}]
    client(caller).chat(
        DEFAULT_MODEL,
        [
            {"role": "user", "content": "Add"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "here", "tool_name": "look"},
            {"role": "tool", "content": "seven"},
        ],
    )
    said = 'user: Add\nassistant: add({"a": 1})look({})\ntool: here\ntool: seven\n'
    assert caller.prompt.startswith(said)


def test_models(gateway: Gateway, caller: Gateway) -> None:
    assert [model.model for model in client(gateway).list().models] == [DEFAULT_MODEL]
    assert client(gateway).show(DEFAULT_MODEL).capabilities == ["completion", "embedding"]
    shown = client(caller).show(DEFAULT_MODEL)
    assert shown.capabilities == ["completion", "embedding", "tools"]
    assert shown.modelinfo["swarm.context_length"] == 1024
    assert "tool_calls" in shown.template
    assert httpx.get(f"{gateway.url}/api/version").json()["version"]


def test_embeddings(gateway: Gateway) -> None:
    found = client(gateway).embed(DEFAULT_MODEL, ["one", "two three"])
    ids = gateway.tokenizer("two three").input_ids
    expected = [sum(ids) / len(ids), float(len(ids)), 1 / 3]
    assert found.embeddings[1] == pytest.approx([value / math.hypot(*expected) for value in expected])
    assert client(gateway).embeddings(DEFAULT_MODEL, "two three").embedding == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": [{"role": "user", "content": "See", "images": ["aGk="]}]}, "this model does not see"),
        ({"options": {"mirostat": 1}}, "mirostat is not supported"),
        ({"options": {"nonsense": 1}}, "there is no field options.nonsense"),
        ({"options": {"num_predict": 0}}, "max_tokens"),
        ({"model": "other"}, "there is no model 'other'"),
        ({"messages": [{"role": "judge", "content": "So"}]}, "messages.0.role"),
    ],
)
def test_what_is_refused(gateway: Gateway, fields: dict[str, Any], sentence: str) -> None:
    answer = httpx.post(f"{gateway.url}/api/chat", json=ASK | fields, timeout=WAIT_S)
    assert answer.status_code in (400, 404) and sentence in answer.json()["error"]


def test_errors(serve: Serve) -> None:
    gateway = serve(keys=["right"])
    with pytest.raises(ollama.ResponseError, match="expected `Authorization") as refused:
        client(gateway).chat(**ASK)
    assert refused.value.status_code == 401
    known = client(gateway, headers={"Authorization": "Bearer right"})
    gateway.says("a", ends=NoSwarm("the swarm is gone"))
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="the swarm is gone"):
            list(known.chat(**ASK, stream=stream))
    assert "/api/pull" in httpx.post(f"{gateway.url}/api/pull").json()["error"]
