"""The HTTP API as the ``openai`` package speaks it."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from starlette.requests import ClientDisconnect

from swarm_client.batching.request import TokenListener
from swarm_gateway.generation.generating import Delta
from swarm_gateway.limits.admission import GatewayLimits
from swarm_gateway.openai_api.formats import CompletionFormat
from swarm_gateway.web.http import OPENAI, ChunkedResponse
from swarm_gateway.web.metrics import CountRequests, Metrics
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.errors import NoRoute
from tests.unit.gateway.app.conftest import WAIT_S, Gateway, Generation, ScriptedBatcher, Serve, encode

TEXT = "return a list of integers, sorted: 🦊 and é\n"
ASK: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Sort"}]}
LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
UNSUPPORTED = "unsupported_parameter"
COMPLETE: dict[str, Any] = {"model": DEFAULT_MODEL, "prompt": "Sort", "max_tokens": 200}


def test_an_answer_of_a_conversation(gateway: Gateway) -> None:
    gateway.says(TEXT)
    answer = gateway.client().chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    (generation,) = gateway.batcher.generations
    request = generation.request
    assert list(request.prompt) == gateway.tokenizer("Sort").input_ids and request.config.max_new_tokens == 1024 - len(
        request.prompt
    )
    assert (request.config.do_sample, request.config.temperature, request.config.top_p) == (True, 1.0, 1.0)
    num_said = len(gateway.batcher.says)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(request.prompt), num_said)
    assert answer.usage.total_tokens == len(request.prompt) + num_said


def test_turns_are_joined_and_parts_of_text_too(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "So"}, {"type": "text", "text": "rt"}]
    turns = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": " it", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "Why"},
    ]
    gateway.client().chat.completions.create(model=DEFAULT_MODEL, messages=turns)
    assert list(gateway.batcher.generations[0].request.prompt) == gateway.tokenizer("Be brief\nSort it\nWhy").input_ids


def test_a_stream_of_a_conversation(gateway: Gateway) -> None:
    gateway.says(TEXT)
    chunks = list(
        gateway.client().chat.completions.create(**ASK, stream=True, n=2, stream_options={"include_usage": True})
    )
    *said, last = chunks
    for index in range(2):
        own = [choice for chunk in said for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == TEXT
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert not any("\N{REPLACEMENT CHARACTER}" in (choice.delta.content or "") for choice in own)
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.choices == [] and last.usage.completion_tokens == 2 * len(gateway.batcher.says)


class WaitingBatcher(ScriptedBatcher):
    """A scripted batcher whose generations say nothing before ``may_say`` is set."""

    def __init__(self, says: list[int]) -> None:
        super().__init__(says)
        self.may_say = threading.Event()

    def _generate(self, generation: Generation, listener: TokenListener) -> None:
        assert self.may_say.wait(WAIT_S)
        super()._generate(generation, listener)


def by_chat(gateway: Gateway) -> Any:
    return gateway.client().chat.completions.create(**ASK, stream=True)


def by_responses(gateway: Gateway) -> Any:
    return gateway.client().responses.create(model=DEFAULT_MODEL, input="Sort", stream=True)


def by_messages(gateway: Gateway) -> Any:
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
    return client.messages.create(**ASK, max_tokens=50, stream=True)


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_a_stream_is_kept_alive_before_its_first_token(
    serve: Serve, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Gateway], Any]
) -> None:
    monkeypatch.setattr("swarm_gateway.web.http._MOST_SILENCE_S", 0.01)
    batcher = WaitingBatcher(encode(tokenizer, "a list"))
    gateway = serve(batcher=batcher)
    stream = ask(gateway)  # which has its headers, although nothing has been said
    batcher.may_say.set()
    assert "a list" in "".join(said_by(event) for event in stream)


def test_a_stream_of_ollama_is_kept_alive_before_its_first_token(
    serve: Serve, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_gateway.web.http._MOST_SILENCE_S", 0.01)
    batcher = WaitingBatcher(encode(tokenizer, "a list"))
    hooks = {"response": [lambda _headers: batcher.may_say.set()]}
    client = ollama.Client(serve(batcher=batcher).url, timeout=WAIT_S, event_hooks=hooks)
    assert "".join(part.message.content for part in client.chat(**ASK, stream=True)) == "a list"


def said_by(event: Any) -> str:
    """The text in an event of a stream of any API."""
    delta = event.choices[0].delta if getattr(event, "choices", None) else getattr(event, "delta", "")
    return delta if isinstance(delta, str) else getattr(delta, "content", None) or getattr(delta, "text", None) or ""


def test_the_end_of_a_stream_is_said_and_nothing_of_it_is_cached(gateway: Gateway) -> None:
    gateway.says(TEXT)
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=ASK | {"stream": True}, timeout=WAIT_S)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "access-control-allow-origin" not in answer.headers
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    assert all("usage" not in json.loads(event[6:]) for event in events[:-2])


def test_a_completion_of_several_prompts(gateway: Gateway) -> None:
    gateway.says(TEXT, ends=None)
    ids = encode(gateway.tokenizer, "Merge them")
    answer = gateway.client().completions.create(model=DEFAULT_MODEL, prompt=["Sort", "Merge"], n=2, max_tokens=5)
    said = gateway.tokenizer.decode(gateway.batcher.says[:5])
    assert [(choice.index, choice.text) for choice in answer.choices] == [(index, said) for index in range(4)]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    prompts = [generation.request.prompt for generation in gateway.batcher.generations]
    assert sorted(prompts) == sorted(2 * [tuple(gateway.tokenizer(prompt).input_ids) for prompt in ("Sort", "Merge")])
    assert answer.usage.prompt_tokens == sum(map(len, prompts)) // 2 and answer.usage.completion_tokens == 20
    for prompt in (ids, [ids]):
        gateway.client().completions.create(model=DEFAULT_MODEL, prompt=prompt)
        request = gateway.batcher.generations[-1].request
        assert list(request.prompt) == ids and request.config.max_new_tokens == 16


@pytest.mark.parametrize("stop", ["integers, sor", ["🦊", "gers"], ["nothing of this", "s, s", "é\n"]])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_it_wherever_tokens_begin(gateway: Gateway, stop: Any, stream: bool) -> None:
    gateway.says(TEXT, ends=None)
    answer = gateway.client().completions.create(**COMPLETE, stop=stop, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    expected = min((TEXT.split(string)[0] for string in ([stop] if isinstance(stop, str) else stop)), key=len)
    assert "".join(choice.text for choice in choices) == expected and choices[-1].finish_reason == "stop"
    assert gateway.batcher.generations[0].cancelled.wait(WAIT_S)


def test_what_is_the_beginning_of_a_stop_string_alone_is_said(gateway: Gateway) -> None:
    gateway.says("so sorted")
    assert gateway.client().completions.create(**COMPLETE, stop="sorted.").choices[0].text == "so sorted"


def test_logprobs_of_a_conversation(gateway: Gateway) -> None:
    gateway.says("list of é")
    answer = gateway.client().chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == len(gateway.batcher.says) and all(each.logprob == -math.log(2) for each in content)
    assert "".join(each.token for each in content).startswith("list of ")
    assert content[0].bytes == list(content[0].token.encode())
    assert [top.logprob for top in content[0].top_logprobs] == [-math.log(2), -2 * math.log(2)]
    assert content[0].top_logprobs[0].token == content[0].token
    stream = gateway.client().chat.completions.create(**ASK, logprobs=True, stream=True)
    parts = [chunk.choices[0] for chunk in stream]
    assert [each.token for part in parts for each in part.logprobs.content] == [each.token for each in content]
    assert gateway.batcher.generations[1].request.num_logprobs == 0


def test_logprobs_of_a_completion_end_before_the_stop_string(gateway: Gateway) -> None:
    gateway.says("a list of integers")
    answer = gateway.client().completions.create(**COMPLETE, logprobs=1, stop=" integers")
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text == "a list of"
    starts = [sum(map(len, logprobs.tokens[:index])) for index in range(len(logprobs.tokens))]
    assert logprobs.text_offset == starts
    assert [top[token] for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)] == [
        -math.log(2)
    ] * len(starts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_answer_may_begin_with_its_prompt(gateway: Gateway, stream: bool, max_tokens: int) -> None:
    gateway.says(TEXT)
    prompts = ["Sort the list", encode(gateway.tokenizer, "Merge é")]
    ask = {"model": DEFAULT_MODEL, "prompt": prompts, "echo": True, "max_tokens": max_tokens, "stop": ["Sort", "Merge"]}
    answer = gateway.client().completions.create(**ask, logprobs=1, stream=stream, n=2)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    ids = [list(gateway.tokenizer(prompts[0]).input_ids), prompts[1]]
    new = gateway.batcher.says[:max_tokens]
    for index in range(4):
        own = [choice for choice in choices if choice.index == index]
        text = ["Sort the list", "Merge é"][index // 2] + gateway.tokenizer.decode(new)
        assert "".join(choice.text for choice in own) == text and own[-1].finish_reason == "length"
        logprobs = [[each for choice in own for each in getattr(choice.logprobs, name)] for name in LOGPROBS]
        tokens, own_logprobs, top, offsets = logprobs
        assert len(tokens) == len(ids[index // 2]) + max_tokens and len(set(map(len, logprobs))) == 1
        assert own_logprobs == [None] + [-math.log(2)] * (len(tokens) - 1)
        assert [None, *({token: -math.log(2)} for token in tokens[1:])] == top
        for token, offset in zip(tokens, offsets, strict=True):
            assert text[offset : offset + len(token)] == token or token in ("<s>", "\N{REPLACEMENT CHARACTER}")
    if not stream:
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(map(len, ids)), 4 * max_tokens)


def test_with_an_echo_the_end_token_counts_too(gateway: Gateway) -> None:
    """Evaluation harnesses ask for one token, and leave it out again."""
    gateway.batcher.says = [1]
    choice = (
        gateway.client()
        .completions.create(model=DEFAULT_MODEL, prompt=[5, 6, 7], echo=True, max_tokens=1, logprobs=0)
        .choices[0]
    )
    assert len(choice.logprobs.tokens) == 4 and choice.logprobs.tokens[-1] == "</s>"
    assert choice.text == gateway.tokenizer.decode([5, 6, 7])


def test_a_prompt_that_fills_the_model_may_be_scored(serve: Any) -> None:
    gateway = serve(max_positions=3)
    ask = {"model": DEFAULT_MODEL, "prompt": [5, 6, 7], "echo": True}
    assert gateway.client().completions.create(**ask, max_tokens=0).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="1 more are asked for"):
        gateway.client().completions.create(**ask, max_tokens=1)


def test_what_is_asked_for_reaches_the_loop(gateway: Gateway) -> None:
    options = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5}
    gateway.client().completions.create(
        **COMPLETE, n=2, seed=7, temperature=0.5, top_p=0.9, user="ada", presence_penalty=1, extra_body=options
    )
    requests = [generation.request for generation in gateway.batcher.generations]
    assert sorted(request.seed for request in requests) == [7, 8]
    config = requests[0].config
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.5, 0.9, 5)
    assert (config.min_p, config.repetition_penalty, len(requests[0].processors)) == (0.1, 1.5, 1)
    assert not any(request.is_background for request in requests)
    gateway.client().completions.create(**COMPLETE, temperature=0, extra_body={"service_tier": "flex"})
    last = gateway.batcher.generations[-1].request
    assert last.config.do_sample is False and last.is_background


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"ignore_eos": True}, []),
        ({"stop_token_ids": [3, 4]}, [1, 3, 4]),
        ({"ignore_eos": True, "stop_token_ids": [3]}, [3]),
    ],
)
def test_tokens_that_end_an_answer(gateway: Gateway, more: dict[str, Any], found: list[int]) -> None:
    gateway.client().completions.create(**COMPLETE, extra_body=more)
    assert gateway.batcher.generations[0].request.config.eos_token_id == found


@pytest.mark.parametrize(("last", "more"), [(1, {}), (7, {"stop_token_ids": [7]})])
def test_a_token_that_ends_an_answer_is_no_text(gateway: Gateway, last: int, more: dict[str, Any]) -> None:
    gateway.batcher.says = [*encode(gateway.tokenizer, "a list"), last]
    choice = gateway.client().completions.create(**COMPLETE, logprobs=0, extra_body=more).choices[0]
    assert (choice.text, choice.finish_reason) == ("a list", "stop")
    assert len(choice.logprobs.tokens) == len(gateway.batcher.says) - 1


@pytest.mark.parametrize(("top_k", "penalty"), [(-1, {"repeat_penalty": 1.5}), (0, {"repetition_penalty": 1.5})])
def test_names_of_other_servers_mean_the_same(gateway: Gateway, top_k: int, penalty: dict[str, float]) -> None:
    gateway.client().completions.create(**COMPLETE, extra_body={"top_k": top_k, **penalty})
    config = gateway.batcher.generations[0].request.config
    assert (config.top_k, config.repetition_penalty) == (0, 1.5)


def test_usage_so_far_in_each_chunk(gateway: Gateway) -> None:
    gateway.says(TEXT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *said, last = gateway.client().completions.create(**COMPLETE, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in said]
    assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in said} == {last.usage.prompt_tokens}


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "user ada: Sort assistant (hm): it "),
        ({"reasoning_effort": "low"}, "user ada: Sort assistant (hm): it low True"),
        ({"reasoning_effort": "none", "verbosity": "high"}, "user ada: Sort assistant (hm): it none False high"),
        (
            {"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            "user ada: Sort assistant (hm): it low False",
        ),
    ],
)
def test_what_the_chat_template_is_told(serve: Any, tokenizer: Any, more: dict[str, Any], told: str) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.name or '(' + m.reasoning_content + ')' }}: {{ m.content }} "
        "{% endfor %}{{ [reasoning_effort, enable_thinking, verbosity] | select('defined') | join(' ') }}"
    )
    gateway = serve(tokenizer=own)
    messages = [
        {"role": "user", "name": "ada", "content": "Sort"},
        {"role": "assistant", "content": "it", "reasoning_content": "hm"},
    ]
    gateway.client().chat.completions.create(model=DEFAULT_MODEL, messages=messages, **more)
    assert list(gateway.batcher.generations[0].request.prompt) == encode(own, told)


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"reasoning_effort": "lots"}, "reasoning_effort", "invalid_value"),
        ({"extra_body": {"repeat_penalty": 1.1, "repetition_penalty": 1.2}}, "repeat_penalty", None),
        ({"extra_body": {"stop_token_ids": [99999]}}, "stop_token_ids", None),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs", UNSUPPORTED),
        ({"extra_body": {"beams": 3}}, "beams", "unknown_parameter"),
        ({"extra_body": {"beams": None}}, "beams", "unknown_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", None),
        ({"top_logprobs": 1}, "top_logprobs", None),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", None),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages", "unsupported_parameter"),
        ({"messages": [{"role": "assistant"}]}, "messages.0", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", None),
        ({"messages": [{"role": "user", "content": "x", "user": "ada"}]}, "messages.0.user", "unknown_parameter"),
        ({"max_tokens": 2000}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "list " * 1200}]}, "messages", "context_length_exceeded"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(gateway: Gateway, more: Any, param: str, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.client().chat.completions.create(**ASK | more)
    error = refused.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert param.partition(".")[0] in error.body["message"] or code == "context_length_exceeded" or code is None
    assert not gateway.batcher.generations


@pytest.mark.parametrize("more", [{"max_tokens": 0}, {"best_of": 2}, {"suffix": "x"}, {"logprobs": 6}, {"prompt": []}])
def test_what_completions_do_not_support_is_refused_by_name(gateway: Gateway, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.client().completions.create(**COMPLETE | more)
    assert refused.value.param == next(iter(more))


@pytest.mark.parametrize(
    ("content", "type_", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"temperature": NaN}', "application/json", 400),
        (b"{}", "text/plain", 415),  # a page of another site may have a browser send it
        (b" " * (8 * 2**20 + 1), "application/json", 413),
    ],
)
def test_bodies_that_are_no_request(gateway: Gateway, content: bytes, type_: str, status: int) -> None:
    url = f"{gateway.url}/v1/chat/completions"
    answer = httpx.post(url, content=content, headers={"Content-Type": type_}, timeout=WAIT_S)
    assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_who_leaves_while_the_body_is_read_leaves_no_traceback(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    address = httpx.URL(gateway.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    counted = 'swarm_requests_total{endpoint="/v1/completions",status="499"} 1.0'
    deadline_s = time.monotonic() + WAIT_S
    while counted not in httpx.get(f"{gateway.url}/metrics", timeout=WAIT_S).text:
        assert time.monotonic() < deadline_s
    assert "Traceback" not in caplog.text


def test_models(gateway: Gateway, caller: Gateway) -> None:
    client = gateway.client()
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
    for model in (client.models.retrieve(DEFAULT_MODEL), client.models.list().data[0]):
        assert (model.id, model.context_length, model.max_model_len) == (DEFAULT_MODEL, 1024, 1024)
        assert model.capabilities == ["completion", "embedding"] and model.chat_template is False
    assert caller.client().models.retrieve(DEFAULT_MODEL).chat_template is True
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("meta-llama/other")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**ASK | {"model": "meta-llama/other"})
    assert missing.value.code == "model_not_found" and missing.value.param == "model"


def test_errors_of_the_swarm(gateway: Gateway) -> None:
    gateway.says("", NoRoute("no server holds blocks 0:4"))
    with pytest.raises(openai.InternalServerError, match="no server holds blocks 0:4") as failed:
        gateway.client().chat.completions.create(**ASK)
    assert failed.value.status_code == 503
    with pytest.raises(openai.InternalServerError) as failed:  # nothing was said, so that it can have its own status
        list(gateway.client().chat.completions.create(**ASK, stream=True))
    assert failed.value.status_code == 503
    gateway.says(TEXT, NoRoute("no server holds blocks 0:4"))
    said = []
    with pytest.raises(openai.APIError, match="no server holds blocks 0:4"):
        for chunk in gateway.client().chat.completions.create(**ASK, stream=True):
            said.append(chunk.choices[0].delta.content)
    assert TEXT.startswith("".join(said)) and said


def test_a_template_that_refuses(serve: Any, tokenizer: Any) -> None:
    strict = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    strict.chat_template = "{{ raise_exception('only users may speak') }}"
    gateway = serve(tokenizer=strict)
    with pytest.raises(openai.BadRequestError, match="only users may speak"):
        gateway.client().chat.completions.create(**ASK)


def test_keys(serve: Any) -> None:
    gateway = serve(keys=("first", "second"))
    gateway.client("second").chat.completions.create(**ASK)
    for key in ("third", "firs", ""):
        with pytest.raises(openai.AuthenticationError) as refused:
            gateway.client(key or "none").chat.completions.create(**ASK)
        assert refused.value.code == "invalid_api_key"
    for path in ("v1/models", "v1/models/x", "metrics"):
        assert httpx.get(f"{gateway.url}/{path}", timeout=WAIT_S).status_code == 401
    assert httpx.get(f"{gateway.url}/health", timeout=WAIT_S).json() == {"status": "ok"}


def test_servers_tell_keys_apart_and_cannot_guess_them(serve: Any) -> None:
    def users() -> list[str]:
        gateway = serve(keys=("first", "second"))
        for key in ("first", "second", "first"):
            gateway.client(key).chat.completions.create(**ASK)
        return [generation.request.user for generation in gateway.batcher.generations]

    first, second, again = names = users()
    assert first == again != second and all("first" not in name and 8 <= len(name) <= 64 for name in names)
    assert not {*names} & {*users()}
    alone = serve()
    alone.client().chat.completions.create(**ASK)
    assert alone.batcher.generations[0].request.user == ""


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("example.org", 403),
        ("a b", 403),
        ("127.0.0.1.example.org", 403),
        ("localhost@example.org", 403),
        ("", 403),
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
    ],
)
def test_without_keys_pages_of_other_sites_are_refused(gateway: Gateway, host: str, status: int) -> None:
    """A browser calls this machine so if their name is made to lead here."""
    assert httpx.get(f"{gateway.url}/v1/models", headers={"Host": host}, timeout=WAIT_S).status_code == status


def test_a_full_queue(serve: Any) -> None:
    gateway = serve(GatewayLimits(max_active=1, max_queued=1))
    gateway.says("so", ends=None)
    first = gateway.client().chat.completions.create(**ASK, stream=True)
    (generation,) = gateway.wait_for_generations(1)
    with pytest.raises(openai.RateLimitError) as refused:
        gateway.client().chat.completions.create(**ASK, n=2)
    assert int(refused.value.response.headers["retry-after"]) > 0
    with pytest.raises(openai.BadRequestError):
        gateway.client().chat.completions.create(**ASK, n=3)
    gateway.batcher.ends = "stop"
    second = threading.Thread(target=lambda: gateway.client().chat.completions.create(**ASK))
    second.start()
    first.close()
    assert generation.cancelled.wait(WAIT_S)
    second.join(WAIT_S)
    assert len(gateway.batcher.generations) == 2


@pytest.mark.parametrize("more", [{"stream": True}, {"stream": True, "n": 3}])
def test_who_closes_a_stream_ends_its_generations(gateway: Gateway, more: dict[str, Any]) -> None:
    gateway.says(TEXT, ends=None)
    stream = gateway.client().chat.completions.create(**ASK, **more)
    assert next(iter(stream)).choices
    generations = gateway.wait_for_generations(more.get("n", 1))
    stream.close()
    assert all(generation.cancelled.wait(WAIT_S) for generation in generations)
    gateway.says(TEXT)
    assert gateway.client().chat.completions.create(**ASK).choices[0].message.content == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_before_the_answer_ends_its_generations(gateway: Gateway, stream: bool) -> None:
    gateway.says("", ends=None)
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        body = ASK | {"n": 2, "stream": stream}
        asking = asyncio.create_task(client.post(f"{gateway.url}/v1/chat/completions", json=body))
        await asyncio.to_thread(gateway.wait_for_generations, 2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert all(generation.cancelled.wait(WAIT_S) for generation in gateway.batcher.generations)


def test_metrics(gateway: Gateway) -> None:
    gateway.says(TEXT)
    gateway.client().completions.create(**COMPLETE)
    with pytest.raises(openai.NotFoundError):
        gateway.client().completions.create(**COMPLETE | {"model": "other"})
    httpx.get(f"{gateway.url}/anything", timeout=WAIT_S)
    text = httpx.get(f"{gateway.url}/metrics", timeout=WAIT_S).text
    num_said = len(gateway.batcher.says)
    for line in (
        'swarm_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'swarm_requests_total{endpoint="/v1/completions",status="404"} 1.0',
        'swarm_requests_total{endpoint="other",status="404"} 1.0',
        f"swarm_generated_tokens_total {num_said:.1f}",
        "swarm_time_to_first_token_seconds_count 1.0",
        f"swarm_time_between_tokens_seconds_count {num_said - 1:.1f}",
        "swarm_generations_active 0.0",
        "swarm_generations_queued 0.0",
    ):
        assert f"{line}\n" in text


@pytest.mark.parametrize(
    ("ends", "status"),
    [(RuntimeError("a bug"), "500"), (ClientDisconnect(), "499"), (asyncio.CancelledError(), "499")],
)
async def test_a_request_without_an_answer_is_counted_by_who_ended_it(ends: BaseException, status: str) -> None:
    async def end(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ends

    without: Any = None
    metrics = Metrics(without)
    with pytest.raises(type(ends)):
        await CountRequests(end, metrics)({"type": "http"}, without, without)
    labels = {"endpoint": "other", "status": status}
    assert metrics.registry.get_sample_value("swarm_requests_total", labels) == 1.0


@pytest.mark.parametrize(
    ("endpoint", "param", "fields"),
    [
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": "word " * 200_000}]}),
        ("completions", "prompt", {"prompt": ["Sort", "word " * 200_000]}),
        ("embeddings", "input", {"input": "word " * 200_000}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_tokens_are_made_of_it(
    gateway: Gateway, endpoint: str, param: str, fields: dict[str, Any]
) -> None:
    answer = httpx.post(f"{gateway.url}/v1/{endpoint}", json={"model": DEFAULT_MODEL} | fields, timeout=WAIT_S)
    error = answer.json()["error"]
    assert answer.status_code == 400 and (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["message"] == "the model has 1024 positions: a text of 1000000 characters has more tokens"


def test_a_stream_is_kept_alive_whenever_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_gateway.web.http._MOST_SILENCE_S", 0.001)
    sent: list[bytes] = []
    idle = OPENAI.idle

    async def until_idle_again(times: int) -> None:
        before = sent.count(idle)
        while sent.count(idle) < before + times:
            await asyncio.sleep(0.001)

    async def chunks() -> AsyncGenerator[bytes, None]:
        await until_idle_again(1)
        yield b"first"
        await until_idle_again(2)
        raise NoRoute("nobody serves the blocks")

    async def send(message: Any) -> None:
        assert message["type"] == ("http.response.body" if sent else "http.response.start")
        sent.append(message.get("body", b"start"))

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(ChunkedResponse(chunks(), is_stream=True)({"type": "http"}, receive, send))
    said = [part for part in sent if part != idle]
    assert said[0] == b"start" and said[1] == b"first" and b"nobody serves the blocks" in said[2]
    assert said[3:] == [b""]


def test_a_whole_answer_reads_its_pieces_once_however_many_choices_there_are() -> None:
    num_reads = 0

    class Pieces(list[Delta]):
        def __iter__(self) -> Iterator[Delta]:
            nonlocal num_reads
            num_reads += 1
            return super().__iter__()

    pieces = Pieces(Delta(choice, f"{part}{choice} ") for part in "ab" for choice in range(9))
    whole = CompletionFormat("m", None).whole(pieces, 9, {})
    assert [choice["text"] for choice in whole["choices"]] == [f"a{choice} b{choice} " for choice in range(9)]
    assert num_reads == 1


def test_more_generations_than_there_can_be_are_refused_before_they_are_prepared(gateway: Gateway) -> None:
    unknown = [[10**9]] * 2048  # which preparing them would refuse
    with pytest.raises(openai.BadRequestError, match="262144 generations: this server takes 320 at most"):
        gateway.client().completions.create(model=DEFAULT_MODEL, prompt=unknown, n=128)
