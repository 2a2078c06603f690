"""Calls of tools: the formats of model families, and the reader that finds calls in an answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

from swarm_gateway.grammars.compiler import GrammarCompiler

_JSON = {"content": "json", "content_args": {"allow_non_json": True}}


@dataclass(frozen=True)
class CallFormat:
    """The format in which a family of models writes calls.

    Attributes:
        marker: a text that only the chat templates of this family contain.
        region: the part of an answer that is a call, as a field of a ``response_template`` of ``transformers``.
        begin, end: the texts around all calls.
        name, arguments, after: the texts around the name and the arguments of each call.
        between: the text between two calls; None if there can be only one call.
    """

    marker: str
    region: Mapping[str, Any]
    name: Sequence[str]
    arguments: Sequence[str]
    after: Sequence[str]
    begin: Sequence[str] = ()
    end: Sequence[str] = ()
    between: Sequence[str] | None = None


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
)


def format_of(template: str) -> CallFormat | None:
    """Return the call format of a chat template; None if it is unknown."""
    plain = template.replace('\\"', '"')
    return next((known for known in FORMATS if known.marker in plain), None)


def region_of(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """Return the region of calls from the tokenizer, or else from its chat template; None if neither defines one."""
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, Mapping) and "tool_calls" in own.get("fields", {}):
        region: Mapping[str, Any] = own["fields"]["tool_calls"]
        return region
    known = format_of(str(tokenizer.chat_template or ""))
    return None if known is None else known.region


def calls_grammar(
    written: CallFormat, arguments: Mapping[str, str], *, several: bool, compiler: GrammarCompiler
) -> str:
    """Return the rule ``calls`` in Lark's syntax: at least one call.

    ``arguments`` maps each tool's name to the name of the rule for its arguments.
    """

    def literals(parts: Sequence[str]) -> str:
        return " ".join(compiler.literal(part) for part in parts)

    more = "" if written.between is None or not several else f"({literals(written.between)} call)*"
    tools = " | ".join(f"{json.dumps(name)} {literals(written.arguments)} {rule}" for name, rule in arguments.items())
    rules = [
        f"calls: {literals(written.begin)} call {more} {literals(written.end)}",
        f"call: {literals(written.name)} ({tools}) {literals(written.after)}",
    ]
    return "\n".join(rules)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: ``arguments`` are JSON text, and ``id`` has letters and digits, as some templates require."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])


class CallReader:
    """A reader that separates calls from an answer's text as it arrives. A call of an unknown tool stays text."""

    def __init__(self, region: Mapping[str, Any], names: Collection[str], *, several: bool = True) -> None:
        """Set up a parser; ``names`` are the tools' names, ``several`` allows more than one call in an answer."""
        self.several = several
        text = {"content": "text", "content_args": {"strip": False}}
        fields = {"tool_calls": {**region, "repeats": True, "optional": True}, "content": text}
        self._parser: ResponseParser | None = ResponseParser({"start_anchor": "\0", "fields": fields}, prefix="")
        self._names = names
        self._unread = ""  # text that was returned neither as text nor in a call

    def put(self, text: str) -> tuple[str, list[ToolCall]]:
        """Read more text; return the text and the calls that have become certain."""
        said = ""
        calls: list[ToolCall] = []
        for position, character in enumerate(text):  # one by one, so that a call ends at its last character
            if self._parser is None:
                return said + text[position:], calls
            self._unread += character
            more, found = self._read(self._parser, character)
            said, calls = said + more, calls + found
        return said, calls

    def end(self, *, is_cut: bool = False) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls that were held. Leave out an unfinished call if the answer ``is_cut``."""
        said, calls = ("", []) if self._parser is None else self._read(self._parser, None)
        return ("" if is_cut and self._is_part_of_call(said) else said), calls

    def _is_part_of_call(self, text: str) -> bool:
        """Return whether ``text`` is the beginning of a call, rather than JSON that the user asked for."""
        has_begun = self._parser is None and bool(self._unread)
        return has_begun and (not text.lstrip().startswith("{") or any(f'"{name}"' in text for name in self._names))

    def _read(self, parser: ResponseParser, text: str | None) -> tuple[str, list[ToolCall]]:
        """Parse ``text``, which is None at the end; return new text and calls."""
        said = ""
        calls: list[ToolCall] = []
        try:
            for event in parser.finalize()[1] if text is None else parser.feed(text):
                if event["type"] == "region_chunk" and event["field"] == "content":
                    said += event["text"]
                    self._unread = self._unread[len(event["text"]) :]
                elif event["type"] == "region_close" and event["field"] == "tool_calls":
                    calls += self._calls(event["value"])
                    self._unread = ""
        except (ValueError, KeyError):  # this is no call, and everything that follows is text
            self._parser, said = None, said + self._unread
        return said, calls

    def _calls(self, value: Any) -> list[ToolCall]:
        """Return the calls in a region. Raise ValueError if it contains anything else."""
        calls = []
        if isinstance(value, str):  # NAME[ARGS]{…}[TOOL_CALLS]NAME[ARGS]{…}
            pairs = [part.partition("[ARGS]") for part in value.split("[TOOL_CALLS]")]
            value = [{"name": name.strip(), "arguments": json.loads(arguments)} for name, _, arguments in pairs]
        for item in value if isinstance(value, list) else [value]:
            function = item.get("function", item) if isinstance(item, dict) else None
            if not isinstance(function, dict) or function.get("name") not in self._names:
                raise ValueError("no call of a tool")
            arguments = function.get("arguments", function.get("parameters", {}))
            if not isinstance(arguments, dict):
                raise ValueError("arguments are no object")
            calls.append(ToolCall(function["name"], json.dumps(arguments, ensure_ascii=False)))
        return calls
