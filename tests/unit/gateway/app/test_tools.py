"""Calls of tools: what the model is told, what its answers mean, and answers that must be calls."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import jsonschema
import openai
import pytest

from swarm_gateway.answers import answer_reader
from swarm_gateway.answers.answer_reader import AnswerReader
from swarm_gateway.answers.tools import FORMATS, call_format_of, call_regions, calls_grammar, properties_of
from swarm_gateway.generation.conversation import conversation_text
from swarm_gateway.generation.requests import ChatRequest
from swarm_gateway.grammars.compiler import GrammarCompiler
from swarm_gateway.limits.admission import ApiError
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.marks import always
from tests.unit.gateway.app.conftest import Gateway, RandomBatcher, Serve
from tests.unit.gateway.app.tool_families import ADD, CALLS, LOOK, SINGLE, TEMPLATES, TOOLS, read_in_parts, tokenizer_of

CLOSED = {"additionalProperties": False}
NOT_THERE = {"type": "function", "function": {"name": "f"}}
ASK: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Sort"}], "tools": TOOLS}


# One of each way to read calls: JSON alone, JSON between tokens, JSON behind a name, and values in tags.
@pytest.fixture(params=always("llama", "qwen", "gpt-oss", "glm", among=TEMPLATES))
def family(request: Any) -> str:
    return request.param


def answers(answer: Any, stream: bool, index: int = 0) -> tuple[str, list[tuple[str, str]], str]:
    """The text, calls and finish reason of a choice."""
    if not stream:
        (choice,) = [choice for choice in answer.choices if choice.index == index]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    text, found, finish = "", {}, ""
    for choice in [choice for chunk in answer for choice in chunk.choices if choice.index == index]:
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            name, arguments = found.get(call.index, (call.function.name, ""))
            assert call.index <= len(found) and (call.id or call.index in found)
            found[call.index] = (name, arguments + (call.function.arguments or ""))
    return text, list(found.values()), finish


@pytest.mark.parametrize(("stream", "special"), [(False, True), (True, False)])
def test_calls_in_an_answer(serve: Serve, tokenizer: Any, family: str, stream: bool, special: bool) -> None:
    own = tokenizer_of(family, tokenizer, special=special)
    gateway = serve(tokenizer=own, vocab_size=len(own))
    before = "" if family == "llama" else "I look."
    gateway.says(before + CALLS[family])
    text, calls, finish = answers(gateway.client().chat.completions.create(**ASK, stream=stream), stream)
    expected = [("add", {"a": 1, "b": "é"}), ("look", {})][: 1 if family in SINGLE else 2]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
    assert (text, finish) == (before, "tool_calls")
    one = gateway.client().chat.completions.create(**ASK, stream=stream, parallel_tool_calls=False)
    assert len(answers(one, stream)[1]) == 1
    prompt = gateway.tokenizer.decode(gateway.batcher.generations[0].request.prompt)
    assert "user: Sort" in prompt and f"add {json.dumps(ADD, ensure_ascii=False)}look" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_calls_is_text(serve: Serve, tokenizer: Any, family: str, stream: bool) -> None:
    gateway = serve(tokenizer=tokenizer_of(family, tokenizer))
    for text in ("so <tool", '{"nam": 1}', CALLS[family][:-3].replace("add", "other"), CALLS[family][:20]):
        gateway.says(text)
        found = answers(gateway.client().chat.completions.create(**ASK, stream=stream), stream)
        assert found == (gateway.tokenizer.decode(gateway.batcher.says), [], "stop")


def test_a_call_that_is_cut_is_neither_a_call_nor_text(serve: Serve, tokenizer: Any, family: str) -> None:
    own = tokenizer_of(family, tokenizer, special=True)
    gateway = serve(tokenizer=own, vocab_size=len(own))
    before, call = "" if family == "llama" else "I look.", CALLS[family].partition("é")[0]
    gateway.says(before + call)
    ask = ASK | {"max_tokens": len(gateway.batcher.says)}
    for stream in (False, True):
        found = answers(gateway.client().chat.completions.create(**ask, stream=stream), stream)
        assert found == (before, [], "length")
    for text in ('{"name": "Ada", "age": 3', "so it is {", "<b"):  # JSON and other text that is cut stays text
        gateway.says(text)
        ask = ASK | {"max_tokens": len(gateway.batcher.says)}
        assert answers(gateway.client().chat.completions.create(**ask), False) == (text, [], "length")


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost_however_the_text_comes(tokenizer: Any, name: str) -> None:
    whole = CALLS[name]
    regions = call_regions(tokenizer_of(name, tokenizer))
    broken = whole.replace('{"a": 1,', '{"a": ,') if '{"a"' in whole else whole.replace("add", "other")
    for seed in range(20):
        for text, num_calls in ((whole, 1 if name in SINGLE else 2), (broken, 0)):
            found = read_in_parts(AnswerReader(regions, TOOLS), text, seed)
            assert (len(found.calls), found.text) == (num_calls, "" if num_calls else broken)


def test_a_call_of_a_name_that_is_no_text_stays_text(tokenizer: Any) -> None:
    for name in ('["add"]', '{"a": 1}', "7", "null"):
        text = f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>'
        found = read_in_parts(AnswerReader(call_regions(tokenizer_of("qwen", tokenizer)), TOOLS), text, seed=0)
        assert (found.calls, found.text) == ([], text)


@pytest.mark.parametrize(
    ("choice", "special"), [("required", True), ({"type": "function", "function": {"name": "add"}}, False)]
)
def test_an_answer_that_must_be_a_call(serve: Serve, tokenizer: Any, family: str, choice: Any, special: bool) -> None:
    own = tokenizer_of(family, tokenizer, special=special)
    gateway = serve(tokenizer=own, batcher=RandomBatcher(len(own)), vocab_size=len(own))
    answer = gateway.client().chat.completions.create(**ASK, tool_choice=choice, n=2, seed=1, max_tokens=300)
    whole = [answers(answer, False, index) for index in range(2) if answer.choices[index].finish_reason != "length"]
    assert whole
    for text, calls, finish in whole:
        assert not text.strip() and finish == "tool_calls" and calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), {"add": ADD, "look": LOOK}[name])
            assert name == "add" or choice == "required"
        assert len(calls) == 1 or choice == "required"


def test_arguments_are_required_as_their_schema_says_wherever_it_stands(tokenizer: Any) -> None:
    written, compiler = call_format_of(TEMPLATES["glm"]), GrammarCompiler(tokenizer, len(tokenizer), [1])
    assert written is not None and written.tags is not None
    own = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    by_reference = {"$ref": "#/$defs/a~1b~0", "$defs": {"a/b~": own}}
    wrong = own | {"required": True}  # as older drafts of JSON schema had it
    found = [
        calls_grammar(written, {"f": schema}, several=False, compiler=compiler)[0]
        for schema in (own, by_reference, wrong)
    ]
    assert found[0] == found[1] and ")?" not in found[0] and ")?" in found[2]


def test_a_schema_is_read_in_time_however_often_it_names_others(tokenizer: Any) -> None:
    """Each level names the next one twice, which are 2**50 ways; the last level names the first."""
    written, compiler = call_format_of(TEMPLATES["glm"]), GrammarCompiler(tokenizer, len(tokenizer), [1])
    assert written is not None
    for last, is_text in (({"type": "integer"}, False), ({"type": ["null", "string"]}, True), ({"enum": [1]}, False)):
        levels: dict[str, Any] = {
            str(level): {"anyOf": [{"$ref": f"#/$defs/{level + 1}"}, {"$ref": f"#/$defs/{level + 1}"}]}
            for level in range(50)
        }
        levels["50"] = {"anyOf": [{"$ref": "#/$defs/0"}, last]}
        schema = {"type": "object", "properties": {"a": levels["0"]}, "required": ["a"], "$defs": levels}
        _, schemas = calls_grammar(written, {"f": schema}, several=False, compiler=compiler)
        assert bool(schemas) != is_text  # a value that is no text follows the rule of its schema


def test_thousands_of_arguments_do_not_follow_thousands_of_references_each(tokenizer: Any) -> None:
    written, compiler = call_format_of(TEMPLATES["glm"]), GrammarCompiler(tokenizer, len(tokenizer), [1])
    assert written is not None
    far = "#" + "/a" * 5000
    for shared in ({"anyOf": [{"type": "null"}] * 5000}, {"$ref": far}):
        schema: dict[str, Any] = {
            "properties": {str(n): {"$ref": "#/$defs/x"} for n in range(5000)},
            "$defs": {"x": shared},
        }
        _, schemas = calls_grammar(written, {"f": schema}, several=False, compiler=compiler)
        assert not schemas  # any text is taken as their values


def test_definitions_that_each_of_many_arguments_has_are_not_written_that_often(tokenizer: Any) -> None:
    written, compiler = call_format_of(TEMPLATES["glm"]), GrammarCompiler(tokenizer, len(tokenizer), [1])
    assert written is not None
    schema: dict[str, Any] = {
        "properties": {str(n): {"type": "integer"} for n in range(100)},
        "$defs": {"x" * 40_000: {}},
    }
    rules, schemas = calls_grammar(written, {"f": schema}, several=False, compiler=compiler)
    assert len(schemas) == 100
    with pytest.raises(ApiError, match=r"at least \d{5} characters: expected at most 65536"):
        compiler.compile(rules, schemas, "tools")


def test_an_answer_is_a_call_or_follows_its_schema(serve: Serve, tokenizer: Any, family: str) -> None:
    own = tokenizer_of(family, tokenizer, special=True)
    gateway = serve(tokenizer=own, batcher=RandomBatcher(len(own)), vocab_size=len(own))
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], **CLOSED}
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    ask = ASK | {"n": 8, "max_tokens": 300, "response_format": format_}
    answer = gateway.client().chat.completions.create(**ask, seed=6)
    whole = [answers(answer, False, index) for index in range(8) if answer.choices[index].finish_reason != "length"]
    for text, calls, finish in whole:
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), {"add": ADD, "look": LOOK}[name])
        if not calls:
            jsonschema.validate(json.loads(text), schema)
        assert finish == ("tool_calls" if calls else "stop") and not (calls and text.strip())
    assert {finish for _, _, finish in whole} == {"tool_calls", "stop"}
    required = gateway.client().chat.completions.create(**ask | {"n": 2, "tool_choice": "required"}, seed=6)
    assert all(choice.finish_reason in ("tool_calls", "length") for choice in required.choices)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_all_that_there_are(serve: Serve, tokenizer: Any, mode: str) -> None:
    gateway = serve(tokenizer=tokenizer_of("qwen", tokenizer))
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "look"}}]}
    ask = ASK | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    gateway.says(CALLS["qwen"].partition("\n<tool_call>\n")[0])
    assert answers(gateway.client().chat.completions.create(**ask), False)[1] == []  # it calls another one
    gateway.says('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    assert answers(gateway.client().chat.completions.create(**ask), False)[1:] == ([("look", "{}")], "tool_calls")
    request = gateway.batcher.generations[0].request
    prompt = gateway.tokenizer.decode(request.prompt)
    assert "look {" in prompt and "add {" not in prompt
    assert len(request.processors) == (mode == "required")


def test_formats_are_told_apart() -> None:
    assert [FORMATS.index(call_format_of(each)) for each in TEMPLATES.values()] == list(range(len(FORMATS)))
    assert call_format_of("{{ messages }} <tool_call> <function=") is None


ARGUMENTS_AS_TEXT = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (TEMPLATES["qwen"] + "{% endif %}assistant:", 'user: Sort\nassistant: add({"a": 1})\ntool: two\nassistant:'),
        (ARGUMENTS_AS_TEXT, 'user: Sortassistant: add{"a": 1}tool: two'),
    ],
    ids=["arguments-as-objects", "arguments-as-text"],
)
def test_what_tools_say_is_in_the_prompt(serve: Serve, tokenizer: Any, template: str, told: str) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    gateway = serve(tokenizer=own)
    call = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Sort"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": [{"type": "text", "text": "two"}]},
    ]
    gateway.client().chat.completions.create(model=DEFAULT_MODEL, messages=messages)
    assert gateway.prompt == told


def test_a_call_of_kimi_has_the_id_that_its_template_writes(serve: Serve, tokenizer: Any) -> None:
    gateway = serve(tokenizer=tokenizer_of("kimi", tokenizer))
    gateway.says(CALLS["kimi"])
    calls = gateway.client().chat.completions.create(**ASK).choices[0].message.tool_calls
    assert [call.id for call in calls] == ["functions.add:0", "functions.look:1"]


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"properties": {"a": {"type": "boolean"}, "b": {"type": ["string", "null"]}}}, {"a": True, "b": "1"}),
        ({"properties": {"a": {"anyOf": [{"type": "array"}, {"type": "null"}]}}}, {"a": [1, "x"]}),
        ({"properties": {"a": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"type": "object"}}}, {"a": {"b": 1}}),
        ({}, {"a": "x y"}),
    ],
)
def test_arguments_in_tags_have_the_types_of_their_schema(
    tokenizer: Any, parameters: dict[str, Any], arguments: dict[str, Any]
) -> None:
    written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    tags = "".join(f'<parameter name="{name}">{value}</parameter>\n' for name, value in written.items())
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    reader = AnswerReader(
        call_regions(tokenizer_of("minimax", tokenizer)), [{"type": "function", "function": function}]
    )
    (call,) = (reader.put(f'<invoke name="f">\n{tags}</invoke>') + reader.end()).calls
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("template", "more", "param"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "tools"),
        ("{{ messages[0].content }}{{ tools }}", {}, "tools"),
        ("{{ messages[0].content }}{{ tools }}", {"tool_choice": "required"}, "tool_choice"),
        (None, {}, "tools"),
        (
            TEMPLATES["qwen"] + "{% endif %}",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOT_THERE]}}},
            "tool_choice",
        ),
        (TEMPLATES["qwen"] + "{% endif %}", {"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        (
            TEMPLATES["qwen"] + "{% endif %}",
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
    ],
)
def test_tools_that_the_model_cannot_have(
    serve: Serve, tokenizer: Any, template: str | None, more: dict[str, Any], param: str
) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    gateway = serve(tokenizer=own)
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.client().chat.completions.create(**ASK | more)
    assert refused.value.param == param and param in str(refused.value)
    gateway.client().chat.completions.create(**ASK, tool_choice="none")


def test_a_template_that_leaves_out_what_tools_say_is_refused(gateway: Gateway) -> None:
    message = {"role": "tool", "tool_call_id": "abc123def", "content": "two"}
    for template in (None, "{{ messages[0].content }}"):
        gateway.tokenizer.chat_template, before = template, gateway.tokenizer.chat_template
        try:
            with pytest.raises(openai.BadRequestError, match="chat template leaves them out"):
                gateway.client().chat.completions.create(
                    model=DEFAULT_MODEL, messages=[{"role": "user", "content": "Sort"}, message]
                )
        finally:
            gateway.tokenizer.chat_template = before


def test_the_template_runs_as_often_for_many_calls_as_for_one(tokenizer: Any) -> None:
    own = tokenizer_of("qwen", tokenizer)
    counts: list[int] = []
    real = own.apply_chat_template
    call = {"id": "abc123def", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": "two"},
    ]

    def counted(*args: Any, **options: Any) -> Any:
        counts[-1] += 1
        return real(*args, **options)

    own.apply_chat_template = counted
    for num_calls in (1, 20):
        counts.append(0)
        asked = ChatRequest.model_validate(ASK | {"messages": [*ASK["messages"], *turns * num_calls]})
        text = conversation_text(asked, own)
        assert text.count("two") == num_calls and "_0_" not in text
    assert counts[0] == counts[1]


def test_a_template_may_write_the_id_of_a_call_in_place_of_its_name(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = (  # as Kimi's
        "{% for turn in messages %}{{ turn.content }}{% for call in turn.tool_calls or [] %}"
        "{{ call.id }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    for arguments in ('{"a": 1}', "not JSON"):
        call = {"id": "functions.add:0", "function": {"name": "add", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked = {"model": DEFAULT_MODEL, "messages": [*ASK["messages"], turn]}
        assert "functions.add:0" in conversation_text(ChatRequest.model_validate(asked), own)


def test_a_template_that_takes_no_text_as_arguments_takes_an_empty_one(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = (  # as LFM2's
        "{% for turn in messages %}{{ turn.content }}{% for call in turn.tool_calls or [] %}{{ call.function.name }}"
        "{% for name, value in (call.function.arguments or {}) | items %}{{ name }}={{ value }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    for arguments, expected in (("", "Sortlook"), ("{}", "Sortlook"), ('{"a": 1}', "Sortlooka=1")):
        call = {"id": "abc123def", "function": {"name": "look", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked = {"model": DEFAULT_MODEL, "messages": [*ASK["messages"], turn]}
        assert conversation_text(ChatRequest.model_validate(asked), own) == expected


def test_a_call_with_an_empty_text_as_arguments_has_an_empty_object(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = (  # as that of Qwen
        "{% for turn in messages %}{{ turn.content }}{% for call in turn.tool_calls or [] %}"
        "{% if call.function.arguments is string %}{{ call.function.arguments }}"
        "{% else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"
    )
    for arguments in ("", " \n", "{}"):
        call = {"id": "abc123def", "function": {"name": "look", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked = {"model": DEFAULT_MODEL, "messages": [*ASK["messages"], turn]}
        assert conversation_text(ChatRequest.model_validate(asked), own) == "Sort{}"


def test_tools_are_read_once_for_all_choices_and_not_on_the_event_loop(
    serve: Serve, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop = list[bool]()

    def noted(schema: Any) -> Any:
        on_loop.append(asyncio._get_running_loop() is not None)
        return properties_of(schema)

    monkeypatch.setattr(answer_reader, "properties_of", noted)
    own = tokenizer_of("minimax", tokenizer)
    gateway = serve(tokenizer=own, vocab_size=len(own))
    gateway.says(CALLS["minimax"])
    answer = gateway.client().chat.completions.create(**ASK, n=8)
    assert on_loop == [False] * len(TOOLS)
    first, *others = [answers(answer, False, index) for index in range(8)]
    assert first[1] and others == [first] * 7


def test_a_template_may_refuse_a_result_without_its_call(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = (  # as that of gpt-oss
        "{% for turn in messages %}{% if turn.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('there is no call') }}{% endif %}{{ turn.content }}{% for call in turn.tool_calls or [] %}"
        "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "abc123def", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": "two"},
    ]
    asked = {"model": DEFAULT_MODEL, "messages": [*ASK["messages"], *turns]}
    assert conversation_text(ChatRequest.model_validate(asked), own) == "Sort{}two"


def test_one_result_of_many_that_the_template_leaves_out_is_refused(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% for turn in messages[:-1] %}{{ turn.content }}{% endfor %}"
    turns = [{"role": "tool", "tool_call_id": "abc123def", "content": "two"} for _ in range(3)]
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [*ASK["messages"], *turns]}
    with pytest.raises(ApiError, match="chat template leaves them out"):
        conversation_text(ChatRequest.model_validate(asked), own)
    asked["messages"].append({"role": "user", "content": "So?"})
    assert conversation_text(ChatRequest.model_validate(asked), own) == "Sorttwotwotwo"


def test_the_tokenizer_may_say_where_calls_are(serve: Serve, tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ messages[0].content }}{{ tools }}"
    calls = {"open": "<<", "close": ">>", "repeats": True, "content": "json"}
    own.response_template = {"start_anchor": "\n", "fields": {"tool_calls": calls, "content": {"content": "text"}}}
    gateway = serve(tokenizer=own)
    gateway.says('so <<{"name": "look", "arguments": {}}>> it')
    assert answers(gateway.client().chat.completions.create(**ASK), False) == ("so  it", [("look", "{}")], "tool_calls")
    with pytest.raises(openai.BadRequestError, match="tool_choice is not supported"):
        gateway.client().chat.completions.create(**ASK, tool_choice="required")
