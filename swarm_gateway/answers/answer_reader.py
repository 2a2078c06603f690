"""The reader of an answer, which separates its reasoning and its calls of tools from its text as they arrive."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from swarm_gateway.answers.tools import properties_of

_ANCHOR = "\0"  # it stands before the answer in the text that the parser reads
_PLAIN = {"content": "text", "content_args": {"strip": False}}
# Regions. What is in any other region is left out.
_TEXT, _ANSWER, _REASONING, _CALLS = "content", "answer", "reasoning", "tool_calls"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: ``arguments`` are JSON text, and ``id`` has letters and digits, as some templates require."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __add__(self, other: AnswerPiece) -> AnswerPiece:
        return AnswerPiece(self.text + other.text, self.reasoning + other.reasoning, self.calls + other.calls)


class AnswerReader:
    """A reader of one answer. A call of an unknown tool stays text, as does a call that is invalid.

    White space around the reasoning belongs to neither the reasoning nor the text.
    """

    def __init__(
        self,
        regions: Mapping[str, Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        several: bool = True,
        prefix: str = "",
    ) -> None:
        """Set up a parser.

        Args:
            regions: fields of a ``response_template`` of ``transformers``: ``reasoning``, ``tool_calls``, ``answer``,
                which is text like all that is in no region, and others, which are left out.
            tools: the tools that may be called, in OpenAI's shape.
            several: whether the answer may have more than one call.
            prefix: what the prompt has of the answer, such as the beginning of its reasoning.
        """
        self.several = several
        repeated = {name: {**_PLAIN, **region, "repeats": True, "optional": True} for name, region in regions.items()}
        template = {"start_anchor": _ANCHOR, "fields": {**repeated, _TEXT: _PLAIN}}
        functions = [tool["function"] for tool in tools]
        self._names = {function["name"] for function in functions}
        typed: list[Any] = [  # as the parser needs it to know the types of arguments: it follows no references
            {"name": each["name"], "parameters": {"properties": properties_of(each.get("parameters") or {})}}
            for each in functions
        ]
        self._new_parser = partial(ResponseParser, load_response_template(template), _ANCHOR + prefix, tools=typed)
        self._parser: ResponseParser | None = self._new_parser()
        self._calls_are_json = regions.get(_CALLS, {}).get("content") != "xml-inline"
        self._region = _TEXT  # the open one
        self._unread = ""  # text that was returned neither as text nor in a call
        self._has_thought = False
        self._space = ""  # white space that is not returned before more reasoning comes
        self._skips_space = False  # there was reasoning, and no text since

    def another(self) -> AnswerReader:
        """Return a reader of another answer to the same request; this one has read nothing yet.

        Regions and schemas are not read again, which takes long for large tools.
        """
        found = copy(self)
        found._parser = self._new_parser()
        return found

    @property
    def is_in_reasoning(self) -> bool:
        return self._region == _REASONING

    def put(self, text: str) -> AnswerPiece:
        """Read more text; return what has become certain."""
        found = AnswerPiece()
        for position, character in enumerate(text):  # one by one, so that a call ends at its last character
            if self._parser is None:
                return found + AnswerPiece(text[position:])
            self._unread += character
            found += self._read(self._parser, character)
        return found

    def end(self, *, is_cut: bool = False) -> AnswerPiece:
        """Return what was held. Leave out an unfinished call if the answer ``is_cut``."""
        if self._parser is None:
            return AnswerPiece()
        found = self._read(self._parser, None)
        return replace(found, text="") if is_cut and self._is_part_of_call(found.text) else found

    def _is_part_of_call(self, text: str) -> bool:
        """Return whether ``text`` is the beginning of a call, rather than JSON that the user asked for."""
        has_begun = self._parser is None and bool(self._unread)
        return has_begun and (not text.lstrip().startswith("{") or any(f'"{name}"' in text for name in self._names))

    def _read(self, parser: ResponseParser, text: str | None) -> AnswerPiece:
        """Parse ``text``, which is None at the end; return what is new."""
        found = AnswerPiece()
        try:
            for event in parser.finalize()[1] if text is None else parser.feed(text):
                if event["type"] == "region_open":
                    self._open(event["field"])
                elif event["type"] == "region_chunk":
                    found += self._chunk(event["field"], event["text"])
                else:
                    found += self._close(event["field"], event["value"], is_marked=text is not None)
        except (ValueError, KeyError):  # this is no call, and everything that follows is text
            self._parser = None
            found += AnswerPiece(self._unread)
        return found

    def _open(self, region: str) -> None:
        self._region = region
        if region not in (_TEXT, _CALLS):  # the text of a call is kept until it is known to be one
            self._unread = ""

    def _chunk(self, region: str, text: str) -> AnswerPiece:
        """Return what text from a region adds to the answer."""
        if region == _CALLS:
            return AnswerPiece()
        self._unread = self._unread[len(text) :]
        if region == _REASONING:
            text = self._space + text if self._has_thought else text.lstrip()
            said = text.rstrip()
            self._has_thought |= bool(said)
            self._space = text[len(said) :]
            return AnswerPiece(reasoning=said)
        if region in (_TEXT, _ANSWER):
            text = text.lstrip() if self._skips_space else text
            self._skips_space &= not text
            return AnswerPiece(text)
        return AnswerPiece()

    def _close(self, region: str, value: Any, *, is_marked: bool) -> AnswerPiece:
        """Return what a region means as a whole. Raise ValueError if it should be a call and is none.

        ``is_marked`` says that the text has the region's end: only JSON shows without this that it is complete.
        """
        self._region, calls = _TEXT, []
        if region == _CALLS:
            if not (is_marked or self._calls_are_json):
                raise ValueError("the call is not complete")
            calls = self._calls(value)
        if region == _REASONING:
            self._space, self._skips_space = "\n\n", True  # before more reasoning, and before text
        if region != _TEXT:
            self._unread = ""
        return AnswerPiece(calls=calls)

    def _calls(self, value: Any) -> list[ToolCall]:
        """Return the calls in a region. Raise ValueError if it contains anything else."""
        calls = []
        if isinstance(value, str):  # NAME[ARGS]{…}[TOOL_CALLS]NAME[ARGS]{…}
            pairs = [part.partition("[ARGS]") for part in value.split("[TOOL_CALLS]")]
            value = [{"name": name.strip(), "arguments": json.loads(arguments)} for name, _, arguments in pairs]
        for item in value if isinstance(value, list) else [value]:
            function = item.get("function", item) if isinstance(item, dict) else None
            if not isinstance(function, dict):
                raise ValueError("no call of a tool")
            name = function.get("name")
            if not isinstance(name, str) or name not in self._names:  # a model may write anything as the name
                raise ValueError("no call of a tool")
            arguments = function.get("arguments", function.get("parameters", {}))
            if not isinstance(arguments, dict):
                raise ValueError("arguments are no object")
            own = {"id": item["id"]} if isinstance(item.get("id"), str) else {}
            calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False), **own))
        return calls
