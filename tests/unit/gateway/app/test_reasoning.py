"""Reasoning: it comes apart from the text in every API, and before an answer that follows a schema or is a call."""

from __future__ import annotations

import copy
import json
from typing import Any

import anthropic
import jsonschema
import ollama
import pytest
from tokenizers import AddedToken

from swarm_gateway.answers.answer_reader import AnswerPiece, AnswerReader
from swarm_gateway.answers.reasoning import FORMATS
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.marks import always
from tests.unit.gateway.app.conftest import WAIT_S, Gateway, RandomBatcher, Serve, encode
from tests.unit.gateway.app.tool_families import ADD, CALLS, LOOK, TEMPLATES, TOOLS, TURNS, read_in_parts

THOUGHT, TEXT = "I add <b> and {.\n\nThen I look.", "a list </b> of words"
# A chat template, how an answer begins that has reasoning, and its end.
FAMILIES = {
    "<think>": (TURNS + "{{ '</think>' }}", "<think>\n", "\n</think>\n\n"),
    "[THINK]": (TURNS + "{{ '[/THINK]' }}", "[THINK]", "[/THINK]"),
    "cohere": (TURNS + "{{ '<|END_THINKING|>' }}", "<|START_THINKING|>", "<|END_THINKING|>"),
    "seed": (TURNS + "{{ '</seed:think>' }}", "<seed:think>", "</seed:think>"),
    "gpt-oss": (
        TEMPLATES["gpt-oss"],
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
ASK: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Sort"}]}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


@pytest.fixture(params=always("<think>", "gpt-oss", among=FAMILIES))
def family(request: Any) -> str:
    return request.param


def thinker(serve: Serve, tokenizer: Any, family: str, *, prompt: str = "", special: bool = True, **more: Any) -> Any:
    """A gateway of a model that thinks; ``prompt`` is what its chat template writes at the end."""
    template, *texts = FAMILIES[family]
    own = copy.deepcopy(tokenizer)
    own.chat_template = f"{template}{{% endif %}}assistant:{prompt}"
    if special:
        marks = "<think> </think> [THINK] [/THINK] <|channel|> <|message|> <|end|> <|start|> <|START_THINKING|>"
        own.add_tokens([AddedToken(mark, special=mark != "<think>") for mark in [*marks.split(), texts[1].strip()]])
    return serve(tokenizer=own, vocab_size=len(own), **more)


def parts(answer: Any, stream: bool) -> tuple[str, str, str, Any]:
    """The reasoning, text, finish reason and usage of an answer."""
    if not stream:
        message = answer.choices[0].message
        return getattr(message, "reasoning_content", ""), message.content, answer.choices[0].finish_reason, answer.usage
    reasoning = text = finish = ""
    usage = None
    for chunk in answer:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not (text and getattr(choice.delta, "reasoning_content", ""))
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return reasoning, text, finish, usage


@pytest.mark.parametrize(("stream", "special"), [(False, True), (True, False)])
@pytest.mark.parametrize("by_prompt", [False, True])
def test_reasoning_comes_apart(
    serve: Serve, tokenizer: Any, family: str, stream: bool, special: bool, by_prompt: bool
) -> None:
    begin, end = FAMILIES[family][1:]
    gateway = thinker(serve, tokenizer, family, prompt=begin if by_prompt else "", special=special)
    gateway.says(("" if by_prompt else begin) + THOUGHT + end + TEXT)
    ask = ASK | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    reasoning, text, finish, usage = parts(gateway.client().chat.completions.create(**ask), stream)
    assert (reasoning, text, finish) == (THOUGHT, TEXT, "stop")
    if special:  # each mark is a token, and the first character after it shows that it was one
        num_thought = len(encode(gateway.tokenizer, THOUGHT))
        assert abs(usage.completion_tokens_details.reasoning_tokens - num_thought) <= 2


def test_an_answer_may_have_no_reasoning(serve: Serve, tokenizer: Any, family: str) -> None:
    end = "" if family == "gpt-oss" else FAMILIES[family][2].strip()
    for prompt, says in (("", TEXT), (FAMILIES[family][1] + end, "so <think> is a tag")):
        gateway = thinker(serve, tokenizer, family, prompt=prompt if end else "")
        gateway.says(says)
        answer = gateway.client().chat.completions.create(**ASK)
        assert answer.choices[0].message.content == says and answer.usage.completion_tokens_details is None
        assert not hasattr(answer.choices[0].message, "reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_cut_is_no_text(serve: Serve, tokenizer: Any, family: str, stream: bool) -> None:
    gateway = thinker(serve, tokenizer, family)
    gateway.says(FAMILIES[family][1] + THOUGHT)
    ask = ASK | {"max_tokens": len(gateway.batcher.says), "stream": stream}
    assert parts(gateway.client().chat.completions.create(**ask), stream)[:3] == (THOUGHT, "", "length")


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_lost_however_the_text_comes(name: str) -> None:
    template, begin, end = FAMILIES[name]
    regions = next(known.regions for known in FORMATS if known.marker in template)
    for seed in range(20):
        found = read_in_parts(AnswerReader(regions), begin + THOUGHT + end + TEXT, seed)
        assert found == AnswerPiece(TEXT, THOUGHT)


@pytest.mark.parametrize("by_prompt", [False, True])
def test_an_answer_that_follows_a_schema_after_reasoning(
    serve: Serve, tokenizer: Any, family: str, by_prompt: bool
) -> None:
    begin, end = FAMILIES[family][1:]
    batcher = RandomBatcher(len(tokenizer) + 10)
    gateway = thinker(serve, tokenizer, family, prompt=begin if by_prompt else "", batcher=batcher)
    batcher.vocab_size = len(gateway.tokenizer)
    ends = gateway.tokenizer.get_added_vocab()["<|end|>" if family == "gpt-oss" else end.strip()]
    begins = gateway.tokenizer.get_added_vocab().get(begin.strip() or "", ends)
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    ask = ASK | {"n": 8, "seed": 3, "max_tokens": 300, "response_format": format_, "logit_bias": {ends: 12, begins: 12}}
    answer = gateway.client().chat.completions.create(**ask)
    whole = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert len(whole) >= 3
    for choice in whole:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert any(hasattr(choice.message, "reasoning_content") for choice in whole) or not by_prompt


def test_a_call_after_reasoning(serve: Serve, tokenizer: Any) -> None:
    gateway = thinker(serve, tokenizer, "<think>")
    gateway.tokenizer.chat_template = TEMPLATES["qwen"] + "{{ '</think>' }}{% endif %}assistant:"
    gateway.says(f"<think>\n{THOUGHT}\n</think>\n\n{CALLS['qwen']}")
    for stream in (False, True):
        answer = gateway.client().chat.completions.create(**ASK, tools=TOOLS, stream=stream)
        if stream:
            chunks = [chunk.choices[0].delta for chunk in answer]
            found = "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks)
            names = [call.function.name for delta in chunks for call in delta.tool_calls or []]
        else:
            found = answer.choices[0].message.reasoning_content
            names = [call.function.name for call in answer.choices[0].message.tool_calls]
        assert (found, names) == (THOUGHT, ["add", "look"])


def test_a_call_of_gpt_oss_after_reasoning(serve: Serve, tokenizer: Any) -> None:
    gateway = thinker(serve, tokenizer, "gpt-oss")
    call = CALLS["gpt-oss"].removesuffix("<|call|>")  # which ends the answer, and is no text
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    gateway.says(f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{preamble}<|start|>assistant{call}")
    message = gateway.client().chat.completions.create(**ASK, tools=TOOLS).choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, "I add.")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("add", {"a": 1, "b": "é"})
    ]


@pytest.fixture
def thinking(serve: Serve, tokenizer: Any) -> Gateway:
    before = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    gateway: Gateway = thinker(serve, tokenizer, "<think>", prompt=before)
    gateway.says(f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}")
    return gateway


def test_a_reasoning_item_of_a_response(thinking: Gateway) -> None:
    client = thinking.client()
    whole = client.responses.create(model=DEFAULT_MODEL, input="Sort")
    assert [item.type for item in whole.output] == ["reasoning", "message"] and whole.output_text == TEXT
    assert [part.text for part in whole.output[0].content] == [THOUGHT]
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model=DEFAULT_MODEL, input="Sort") as stream:
        events = list(stream)
    said = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(said) == THOUGHT and len(said) > 1
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == ["reasoning", "message"]
    assert [event.output_index for event in events if event.type == "response.content_part.added"] == [0, 1]
    client.responses.create(model=DEFAULT_MODEL, input="And then?", previous_response_id=whole.id)
    assert thinking.prompt.endswith(THOUGHT)  # the next question told the model what it had thought


@pytest.mark.parametrize("cut", [False, True])
def test_a_thinking_block_of_a_message(thinking: Gateway, cut: bool) -> None:
    if cut:
        thinking.says(f"<think>{THOUGHT}")
    client = anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0, timeout=WAIT_S)
    ask = ASK | {"max_tokens": len(thinking.batcher.says) + (not cut)}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.content[0].thinking == THOUGHT
        assert [block.text for block in message.content[1:]] == ([] if cut else [TEXT])
        assert message.stop_reason == ("max_tokens" if cut else "end_turn")


def test_what_ollama_calls_thinking(thinking: Gateway) -> None:
    client = ollama.Client(thinking.url, timeout=WAIT_S)
    whole = client.chat(**ASK).message
    assert (whole.thinking, whole.content) == (THOUGHT, TEXT)
    streamed = [part.message for part in client.chat(**ASK, stream=True)]
    assert "".join(part.thinking or "" for part in streamed) == THOUGHT
    assert "".join(part.content or "" for part in streamed) == TEXT
    assert client.generate(DEFAULT_MODEL, "Sort").thinking == THOUGHT
    assert "thinking" in client.show(DEFAULT_MODEL).capabilities


def test_a_forced_call_comes_after_reasoning(serve: Serve, tokenizer: Any) -> None:
    batcher = RandomBatcher(0)
    gateway = thinker(serve, tokenizer, "<think>", prompt="<think>", batcher=batcher)
    gateway.tokenizer.chat_template = TEMPLATES["qwen"] + "{{ '</think>' }}{% endif %}assistant:<think>"
    batcher.vocab_size = len(gateway.tokenizer)
    bias = {gateway.tokenizer.get_added_vocab()["</think>"]: 12}
    ask = ASK | {"tools": TOOLS, "tool_choice": "required", "n": 6, "seed": 1, "max_tokens": 300, "logit_bias": bias}
    answer = gateway.client().chat.completions.create(**ask)
    whole = [choice.message for choice in answer.choices if choice.finish_reason == "tool_calls"]
    assert len(whole) >= 2
    for message in whole:
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), {"add": ADD, "look": LOOK}[call.function.name])
