"""Answers that must be JSON, whatever the model would say: here, anything."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from swarm_gateway.grammars import compiler as compiler_module
from swarm_gateway.grammars.compiler import GrammarCompiler
from swarm_gateway.limits.admission import ApiError
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.unit.gateway.app.conftest import Gateway, RandomBatcher, Serve

ASK: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Sort"}], "max_tokens": 400}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é🦊"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": PERSON,
    "number": {"type": "number", "minimum": -2, "maximum": 2},
    "text": {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]+$", "maxLength": 20},
    "choice": {"anyOf": [{"const": None}, {"type": "boolean"}, PERSON]},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
                "required": ["children"],
                "additionalProperties": False,
            }
        },
    },
    "together": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
}


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture
def random(serve: Serve, tokenizer: Any) -> Gateway:
    """Its model has three tokens more than the tokenizer, as many have."""
    return serve(batcher=RandomBatcher(len(tokenizer) + 3), vocab_size=len(tokenizer) + 3)


def test_a_schema_that_a_busy_machine_could_not_check_is_checked_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [1])
    schemas = {"answer": {"const": "checked twice"}}
    with monkeypatch.context() as busy:
        busy.setattr(compiler_module, "_CHECK_S", 0.0)
        with pytest.raises(ApiError, match="takes too long"):
            compiler.compile("start: answer", schemas, "response_format")
    assert compiler.compile("start: answer", schemas, "response_format").end_ids == (1,)


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_follows_its_schema(random: Gateway, name: str) -> None:
    schema, stream = SCHEMAS[name], name in ("object", "text")
    answer = random.client().chat.completions.create(
        **ASK, response_format=named(schema), n=5, seed=3, stream=stream, logprobs=True
    )
    texts, ends = [""] * 5, [""] * 5
    for choice in [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices:
        texts[choice.index] += (choice.delta if stream else choice.message).content or ""
        ends[choice.index] = choice.finish_reason or ""
    whole = [text for text, end in zip(texts, ends, strict=True) if end == "stop"]
    assert len(whole) >= 2 and set(ends) <= {"stop", "length"}
    for text in whole:
        jsonschema.validate(json.loads(text), schema)


def test_json_without_a_schema_is_an_object_and_may_be_cut(random: Gateway) -> None:
    answer = random.client().chat.completions.create(
        **ASK | {"max_tokens": 300}, response_format={"type": "json_object"}, n=6, seed=1
    )
    whole = [choice.message.content for choice in answer.choices if choice.finish_reason == "stop"]
    assert len(whole) >= 2 and all(isinstance(json.loads(text), dict) for text in whole)
    cut = random.client().chat.completions.create(**ASK | {"max_tokens": 2}, response_format=named(PERSON))
    assert cut.choices[0].finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut.choices[0].message.content)


def chain(length: int) -> dict[str, Any]:
    steps = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**steps, str(length): {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "string", "pattern": "(("}, "unclosed group"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"$ref": "https://example.org/schema"}, "does not fetch"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "nothing satisfies it"),
        ({"type": "integer", "multipleOf": 100_000_007}, "takes too long"),
        ({"enum": ["x" * 70_000]}, "expected at most 65536"),
        (chain(4000), "expected at most 65536"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(random: Gateway, schema: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        random.client().chat.completions.create(**ASK, response_format=named(schema))
    assert refused.value.param == "response_format" and "x-guidance" not in str(refused.value)


def test_a_deep_schema_does_no_harm(random: Gateway) -> None:
    """What compiles it needs more stack than a thread has: this has ended whole processes."""
    client = random.client()
    for schema in (chain(1200), {"$defs": {"a": {"allOf": [{"$ref": "#"}]}}, **chain(1000)}):
        try:
            answer = client.chat.completions.create(**ASK, response_format=named(schema)).choices[0]
        except openai.BadRequestError as error:
            assert error.param == "response_format"
        else:
            assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), int)


def test_a_tokenizer_whose_tokens_cannot_be_known_is_refused_by_name(serve: Serve, tokenizer: Any) -> None:
    class SlowTokenizer:
        chat_template = None
        eos_token_id = 1

        def __call__(self, *args: Any, **options: Any) -> Any:
            return tokenizer(*args, **options)

        def get_vocab(self) -> dict[str, int]:
            return dict(tokenizer.get_vocab())

        def decode(self, *args: Any, **options: Any) -> str:
            return str(tokenizer.decode(*args, **options))

    gateway = serve(tokenizer=SlowTokenizer())
    with pytest.raises(openai.BadRequestError, match=r"response_format is not supported.*SlowTokenizer"):
        gateway.client().chat.completions.create(**ASK, response_format=named(PERSON))
