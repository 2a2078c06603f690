"""Calls of tools: the formats in which families of models write them, and grammars of answers that must be calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from swarm_gateway.grammars.compiler import GrammarCompiler

_JSON = {"content": "json", "content_args": {"allow_non_json": True}}
_CALL = {"function": {"name": "{name}", "arguments": "{content}"}}
_MOST_REFERENCES = 16  # that are followed from one schema to the next, as references may form a cycle
# Thousands of arguments may lead to the same schemas, which are followed for each of them again.
_MOST_STEPS = 32  # of one reference; one with more is not followed
_MOST_CHOICES = 1000  # that are looked at for the value of one argument
_INDEX = re.compile("[0-9]{1,2}")


@dataclass(frozen=True)
class Tags:
    """The texts before the name of an argument, between it and the value, and after the value.

    A value that may be text is written as it is, and any other as JSON, before which ``between_json`` may stand.
    """

    before: Sequence[str]
    between: Sequence[str]
    after: Sequence[str]
    between_json: Sequence[str] | None = None


@dataclass(frozen=True)
class CallFormat:
    """The format in which a family of models writes calls.

    Attributes:
        marker: a text that only the chat templates of this family contain.
        region: the part of an answer that is a call, as a field of a ``response_template`` of ``transformers``.
        begin, end: the texts around all calls.
        name, arguments, after: the texts around the name and the arguments of each call.
        between: the text between two calls; None if there can be only one call.
        tags: the texts around each argument; None if the arguments are a JSON object.
        closing: a text after the last call that is in no region, and does not belong to the answer either.
        second_marker: a text that only this version has, if later ones in ``FORMATS`` have the same marker.
    """

    marker: str
    region: Mapping[str, Any]
    name: Sequence[str]
    arguments: Sequence[str | re.Pattern[str]]
    after: Sequence[str]
    begin: Sequence[str] = ()
    end: Sequence[str] = ()
    between: Sequence[str] | None = None
    tags: Tags | None = None
    closing: str = ""
    second_marker: str = ""


def _functions_in_tags(marker: str, begin: str, end: str) -> CallFormat:
    """Return the format of Qwen3-Coder, or of another family that has other texts around each call."""
    pattern = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    return CallFormat(
        marker=marker,
        region={
            # Some answers lack ``begin``.
            "open_pattern": rf"\s*(?:{re.escape(begin)}\s*)?<function=(?P<name>[^>\s]+)>",
            "close": end,
            "content": "xml-inline",
            "content_args": {"tag_pattern": pattern},
            "transform": _CALL,
        },
        name=[begin, "\n<function="],
        arguments=[">\n"],
        after=["</function>\n", end],
        between=["\n"],
        tags=Tags(["<parameter="], [">\n"], ["\n</parameter>\n"]),
    )


def _functions_in_dsml(block: str) -> CallFormat:
    """Return the format of DeepSeek since V3.2, whose versions name the block around all calls differently."""

    def tag(text: str, begin: str = "<") -> list[str]:
        return [begin, "｜DSML｜", text]

    pattern = r'<｜DSML｜parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</｜DSML｜parameter>'
    return CallFormat(
        marker="｜DSML｜",
        second_marker=f"{block}>",
        region={
            "open_pattern": rf'\s*(?:<｜DSML｜{block}>)?\s*<｜DSML｜invoke name="(?P<name>[^"]+)">',
            "close": "</｜DSML｜invoke>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": pattern},
            "transform": _CALL,
        },
        begin=[*tag(block + ">"), "\n"],
        name=tag('invoke name="'),
        arguments=['">\n'],
        after=[*tag("invoke>", "</"), "\n"],
        between=[],
        end=tag(f"{block}>", "</"),
        tags=Tags(
            before=tag('parameter name="'),
            between=['" string="true">'],
            after=[*tag("parameter>", "</"), "\n"],
            between_json=['" string="false">'],
        ),
        closing=f"</｜DSML｜{block}>",
    )


# The first format whose markers a template has is taken: a marker that other families have too comes after theirs.
FORMATS = (
    CallFormat(  # Llama 3.1 to 3.3
        marker='"parameters": dictionary of argument name',
        region={"open_pattern": r"(?:\A|<\|python_tag\|>)\s*(?=\{\s*\"name\")", **_JSON},
        name=['{"name": "'],
        arguments=['", "parameters": '],
        after=["}"],
    ),
    CallFormat(  # Mistral since 2025
        marker="[ARGS]",
        region={"open": "[TOOL_CALLS]", **_JSON},
        name=["[TOOL_CALLS]"],
        arguments=["[ARGS]"],
        after=[],
        between=[],
    ),
    CallFormat(  # Mistral before that
        marker="[TOOL_CALLS]",
        region={"open": "[TOOL_CALLS]", **_JSON},
        begin=["[TOOL_CALLS]", "["],
        name=['{"name": "'],
        arguments=['", "arguments": '],
        after=["}"],
        between=[", "],
        end=["]"],
    ),
    CallFormat(  # Hermes, Qwen 2 to 3
        marker='"arguments": <args-json-object>}\\n</tool_call>',
        region={"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **_JSON},
        name=["<tool_call>", '\n{"name": "'],
        arguments=['", "arguments": '],
        after=["}\n", "</tool_call>"],
        between=["\n"],
    ),
    CallFormat(  # gpt-oss; the token that ends a call also ends the answer
        marker="<|channel|>analysis<|message|>",
        region={
            "open_pattern": r"(?:<\|start\|>assistant)?"
            r"(?: to=functions\.(?P<name>[\w-]+)<\|channel\|>\w+|<\|channel\|>\w+ to=functions\.(?P<name>[\w-]+))"
            r"(?: ?<\|constrain\|>)?(?: ?\w+)?<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "transform": _CALL,
        },
        name=["<|channel|>", "commentary to=functions."],
        arguments=[" ", "<|constrain|>", "json", "<|message|>"],
        after=[],
    ),
    CallFormat(  # DeepSeek V3 and R1
        marker="```json",
        region={
            "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?\s*"
            r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
            "close": "\n```<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _CALL,
        },
        begin=["<｜tool▁calls▁begin｜>"],
        name=["<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"],
        arguments=["\n```json\n"],
        after=["\n```", "<｜tool▁call▁end｜>"],
        between=["\n"],
        end=["<｜tool▁calls▁end｜>"],
        closing="<｜tool▁calls▁end｜>",
    ),
    CallFormat(  # DeepSeek V3.1
        marker="<｜tool▁sep｜>",
        region={
            "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^<\n]+)<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _CALL,
        },
        begin=["<｜tool▁calls▁begin｜>"],
        name=["<｜tool▁call▁begin｜>"],
        arguments=["<｜tool▁sep｜>"],
        after=["<｜tool▁call▁end｜>"],
        between=[],
        end=["<｜tool▁calls▁end｜>"],
        closing="<｜tool▁calls▁end｜>",
    ),
    _functions_in_dsml("function_calls"),  # DeepSeek V3.2
    _functions_in_dsml("tool_calls"),  # DeepSeek V4
    CallFormat(  # Kimi K2; its chat template writes the call's id, which has the name
        marker="<|tool_call_argument_begin|>",
        region={
            "open_pattern": r"\s*(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*"
            r"(?P<id>functions\.(?P<name>[\w-]+):[0-9]+)\s*<\|tool_call_argument_begin\|>",
            "close": "<|tool_call_end|>",
            "content": "json",
            "transform": {"id": "{id}", **_CALL},
        },
        begin=["<|tool_calls_section_begin|>"],
        name=["<|tool_call_begin|>", "functions."],
        arguments=[":", _INDEX, "<|tool_call_argument_begin|>"],
        after=["<|tool_call_end|>"],
        between=[],
        end=["<|tool_calls_section_end|>"],
        closing="<|tool_calls_section_end|>",
    ),
    CallFormat(  # GLM 4.5 and later
        marker="<arg_key>",
        region={
            "open_pattern": r"\s*<tool_call>\s*(?P<name>[^<\s]+)\s*",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
            "transform": _CALL,
        },
        name=["<tool_call>"],
        arguments=["\n"],
        after=["</tool_call>"],
        between=["\n"],
        tags=Tags(["<arg_key>"], ["</arg_key>", "\n", "<arg_value>"], ["</arg_value>", "\n"]),
    ),
    CallFormat(  # MiniMax M2
        marker="<minimax:tool_call>",
        region={
            "open_pattern": r'\s*(?:<minimax:tool_call>)?\s*<invoke name="(?P<name>[^"]+)">',
            "close": "</invoke>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'},
            "transform": _CALL,
        },
        begin=["<minimax:tool_call>", "\n"],
        name=['<invoke name="'],
        arguments=['">\n'],
        after=["</invoke>\n"],
        between=[],
        end=["</minimax:tool_call>"],
        tags=Tags(['<parameter name="'], ['">'], ["</parameter>", "\n"]),
        closing="</minimax:tool_call>",
    ),
    _functions_in_tags("<seed:tool_call>", "<seed:tool_call>", "</seed:tool_call>"),  # Seed-OSS
    _functions_in_tags("<parameter=", "<tool_call>", "</tool_call>"),  # Qwen3-Coder, Qwen 3.5
)


def call_format_of(template: str) -> CallFormat | None:
    """Return the call format of a chat template; None if it is unknown."""
    plain = template.replace('\\"', '"')  # Jinja's strings escape the quotes of JSON
    return next((known for known in FORMATS if known.marker in plain and known.second_marker in plain), None)


def call_regions(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Mapping[str, Any]]:
    """Return the regions of calls, as fields of a ``response_template``; they are empty if the format is unknown.

    The region ``tool_calls`` is a call. What is in any other region does not belong to the answer. The tokenizer's own
    ``response_template`` goes before the formats that are known here.
    """
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, Mapping) and "tool_calls" in own.get("fields", {}):
        return {"tool_calls": own["fields"]["tool_calls"]}
    known = call_format_of(str(tokenizer.chat_template or ""))
    if known is None:
        return {}
    closing = {"closing": {"open_pattern": rf"\s*{re.escape(known.closing)}"}} if known.closing else {}
    return {"tool_calls": known.region, **closing}


def calls_grammar(
    written: CallFormat, tools: Mapping[str, Mapping[str, Any]], *, several: bool, compiler: GrammarCompiler
) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """Return rules in Lark's syntax, of which ``calls`` is at least one call, and the schemas of rules for JSON.

    ``tools`` maps each tool's name to the JSON schema of its arguments.
    """
    rules: list[str] = []
    schemas: dict[str, Mapping[str, Any]] = {}
    choices = []
    for number, (name, schema) in enumerate(tools.items()):
        own = f"arguments{number}"
        if written.tags is None:
            schemas[own] = schema
        else:
            rules.append(f"{own}: {_tagged(written.tags, schema, own, schemas, compiler)}")
        choices.append(f"{json.dumps(name)} {_literals(written.arguments, compiler)} {own}")
    if written.tags is not None:
        rules.append(_text_rule(written.tags, compiler))
    more = "" if written.between is None or not several else f"({_literals(written.between, compiler)} call)*"
    rules += [
        f"calls: {_literals(written.begin, compiler)} call {more} {_literals(written.end, compiler)}",
        f"call: {_literals(written.name, compiler)} ({' | '.join(choices)}) {_literals(written.after, compiler)}",
    ]
    return "\n".join(rules), schemas


def _literals(parts: Sequence[str | re.Pattern[str]], compiler: GrammarCompiler) -> str:
    return " ".join(compiler.literal(part) if isinstance(part, str) else f"/{part.pattern}/" for part in parts)


_TEXT = "argument_text"  # the rule of a value that is any text, with what is after it


def _text_rule(tags: Tags, compiler: GrammarCompiler) -> str:
    from swarm_gateway.grammars.compiler import text_until  # it needs a package that only the gateway has

    first, *rest = tags.after
    return f"{text_until(f'{_TEXT}_body', compiler.literal(first))}\n{_TEXT}: {_TEXT}_body {_literals(rest, compiler)}"


def _tagged(
    tags: Tags,
    schema: Mapping[str, Any],
    name: str,
    schemas: dict[str, Mapping[str, Any]],
    compiler: GrammarCompiler,
) -> str:
    """Return the expression of the arguments that follow ``schema``, in its order, and add the schemas of values."""
    properties = properties_of(schema)
    arguments = _followed(schema, schema)  # which a model of arguments that contains itself gives by a reference
    required = arguments.get("required")
    before, between = _literals(tags.before, compiler), _literals(tags.between, compiler)
    between_json = between if tags.between_json is None else _literals(tags.between_json, compiler)
    after = _literals(tags.after, compiler)
    if not properties:
        is_closed = arguments.get("additionalProperties") is False
        return '""' if is_closed else f"({before} /[A-Za-z_][A-Za-z0-9_-]*/ {between} {_TEXT})*"
    found = []
    for number, (key, value) in enumerate(properties.items()):
        options = value.get("enum", [value["const"]] if "const" in value else None)
        if isinstance(options, list) and all(isinstance(option, str) and option for option in options):
            written = f"{between} ({' | '.join(map(json.dumps, options))}) {after}"
        elif _may_be_text(value, schema):
            written = f"{between} {_TEXT}"
        else:
            rule = f"{name}_{number}"
            schemas[rule] = {key: schema[key] for key in ("$defs", "definitions") if key in schema} | dict(value)
            written = f"{between_json} {rule} {after}"
        argument = f"{before} {json.dumps(key)} {written}"
        found.append(argument if isinstance(required, list) and key in required else f"({argument})?")
    return " ".join(found)


def properties_of(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of an object's properties, without references to other places of ``schema``."""
    properties = _followed(schema, schema).get("properties")
    return {
        name: _followed(value, schema)
        for name, value in (properties.items() if isinstance(properties, Mapping) else ())
    }


def _followed(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference within ``root`` names, or else ``schema``; True is the empty schema."""
    for _ in range(_MOST_REFERENCES):
        place = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(place, str) or not place.startswith("#") or place.count("/") > _MOST_STEPS:
            break
        schema = root
        for step in place.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")  # as a JSON pointer writes these two
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _may_be_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return whether a value that follows ``schema`` may be a string; True if it has too many choices to look at."""
    seen: set[int] = set()  # references may form a cycle, or lead to one schema in more ways than can be followed
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kinds = each.get("type")
        choices = next((each[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(each.get(name), list)), None)
        if kinds is not None:
            if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
                return True
        elif choices is not None:
            if len(seen) + len(waiting) + len(choices) > _MOST_CHOICES:
                return True
            waiting += [_followed(choice, root) for choice in choices]
        elif "enum" not in each and "const" not in each:
            return True
    return False
