"""Anthropic's Messages API, as its official client speaks it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from swarm_gateway.limits.admission import GatewayLimits
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.errors import NoSwarm
from tests.unit.gateway.app.conftest import WAIT_S, Gateway, Serve, encode
from tests.unit.gateway.app.tool_families import ADD, CALLS, LOOK

TOOLS = [
    {"name": "add", "description": "Adds.", "input_schema": ADD},
    {"name": "look", "input_schema": LOOK, "cache_control": {"type": "ephemeral"}},
]
ASK: dict[str, Any] = {"model": DEFAULT_MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Sort"}]}


def client(gateway: Gateway, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=WAIT_S)


def ask(gateway: Gateway, stream: bool, **fields: Any) -> anthropic.types.Message:
    if not stream:
        return client(gateway).messages.create(**ASK | fields)
    with client(gateway).messages.stream(**ASK | fields) as events:
        return events.get_final_message()


def test_an_answer_whole_and_in_events(gateway: Gateway) -> None:
    gateway.says("a list of words")
    num_tokens = len(gateway.batcher.says)
    whole = client(gateway).messages.create(**ASK)
    assert [(block.type, block.text) for block in whole.content] == [("text", "a list of words")]
    assert (whole.role, whole.type) == ("assistant", "message")
    assert (whole.model, whole.stop_reason) == (DEFAULT_MODEL, "end_turn")
    num_prompt = len(gateway.batcher.generations[0].request.prompt)
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (num_prompt, num_tokens)
    with client(gateway).messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert [block.text for block in last.content] == ["a list of words"]
    assert last.stop_reason == "end_turn" and last.usage.output_tokens == num_tokens
    assert last.usage.input_tokens == num_prompt


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(gateway: Gateway, stream: bool) -> None:
    gateway.says("one two three")
    stopped = ask(gateway, stream, stop_sequences=["nowhere", " two"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " two")
    assert [block.text for block in stopped.content] == ["one"]
    cut = ask(gateway, stream, max_tokens=1)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 1)
    gateway.says("")
    assert [block.text for block in ask(gateway, stream).content] == [""]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(caller: Gateway, stream: bool) -> None:
    caller.says("I look.\n" + CALLS["qwen"])
    found = ask(caller, stream, tools=TOOLS)
    text, *calls = found.content
    assert text.text.strip() == "I look." and found.stop_reason == "tool_use"
    assert [(call.name, call.input) for call in calls] == [("add", {"a": 1, "b": "é"}), ("look", {})]
    assert f"add {json.dumps(ADD, ensure_ascii=False)}look" in caller.prompt
    caller.says(CALLS["qwen"])
    assert [block.type for block in ask(caller, stream, tools=TOOLS).content] == ["tool_use", "tool_use"]


def test_what_the_model_reads(caller: Gateway) -> None:
    caller.says("3")
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": "é"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "seven"}]}
    client(caller).messages.create(
        **ASK
        | {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Add"},
                {"role": "assistant", "content": [{"type": "text", "text": "I add."}, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
            ],
            "tools": TOOLS,
            "metadata": {"user_id": "ada"},
        }
    )
    said = 'system: Be brief.\nuser: Add\nassistant: I add.add({"a": 1, "b": "é"})\ntool: seven\nuser: And now?\n'
    assert caller.prompt.startswith(said)
    config = caller.batcher.generations[-1].request.config
    assert config.max_new_tokens == 100


def test_more_tokens_than_the_model_has_positions_for(gateway: Gateway) -> None:
    gateway.says("a")
    client(gateway).messages.create(**ASK | {"max_tokens": 32_000})
    request = gateway.batcher.generations[-1].request
    assert request.config.max_new_tokens == 1024 - len(request.prompt)


def test_the_number_of_tokens(caller: Gateway) -> None:
    counted = client(caller).messages.count_tokens(model=DEFAULT_MODEL, messages=ASK["messages"], tools=TOOLS)
    caller.says("a")
    assert client(caller).messages.create(**ASK | {"tools": TOOLS}).usage.input_tokens == counted.input_tokens
    assert caller.batcher.generations[-1].request.prompt[-1:] == tuple(encode(caller.tokenizer, "assistant:")[-1:])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "of type 'document' is not",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image.source.type"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, "the last message is the assistant's"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not supported"),
        ({"tool_choice": {"type": "any"}}, "expected tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"nonsense": 1}}, "there is no field nonsense"),
    ],
)
def test_what_is_refused(gateway: Gateway, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=sentence) as refused:
        client(gateway).messages.create(**ASK | fields)
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_errors_have_the_types_that_clients_know(serve: Serve) -> None:
    gateway = serve(GatewayLimits(requests_per_minute=3), keys=["right"])
    with pytest.raises(anthropic.AuthenticationError):
        client(gateway, "wrong").messages.create(**ASK)
    with pytest.raises(anthropic.NotFoundError):
        client(gateway, "right").messages.create(**ASK | {"model": "other"})
    gateway.says("a", ends=NoSwarm("the swarm is gone"))
    with pytest.raises(anthropic.InternalServerError, match="the swarm is gone"):
        client(gateway, "right").messages.create(**ASK)
    stream = client(gateway, "right").messages.stream(**ASK)
    with pytest.raises(anthropic.APIStatusError, match="the swarm is gone"), stream as events:
        events.get_final_message()
    with pytest.raises(anthropic.RateLimitError):
        client(gateway, "right").messages.create(**ASK)


def test_the_models(gateway: Gateway) -> None:
    (model,) = client(gateway).models.list()
    assert (model.id, model.display_name, model.type) == (DEFAULT_MODEL, DEFAULT_MODEL, "model")
    assert client(gateway).models.retrieve(DEFAULT_MODEL).created_at == model.created_at
