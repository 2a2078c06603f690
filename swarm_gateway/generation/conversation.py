"""A conversation as the text of a model's chat template, and the grammar of its next answer."""

from __future__ import annotations

import copy
import inspect
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from swarm_client.generation.templates import render
from swarm_gateway.answers.answer_reader import AnswerReader
from swarm_gateway.answers.reasoning import reasoning_of
from swarm_gateway.answers.tools import call_format_of, call_regions, calls_grammar
from swarm_gateway.generation.parts import NamedTool
from swarm_gateway.generation.requests import ChatRequest, CompletionRequest
from swarm_gateway.grammars.compiler import Grammar
from swarm_gateway.limits.admission import ApiError
from swarm_gateway.web.models import ServedModel

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Arguments of the rendering itself. Only ``documents`` is also a variable of templates.
_NO_VARIABLES = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"documents"}


def conversation_text(asked: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the conversation's text. Raise ApiError if the chat template refuses messages, or omits tools or calls."""
    _check_variables(asked.chat_template_kwargs)
    turns = [message.as_turn() for message in asked.messages]
    if _takes_parts_alone(tokenizer):
        turns = list(map(_in_parts, turns))
    offered = _offered(asked)
    text = partial(_rendered, tokenizer, asked.template_options)
    if not tokenizer.chat_template and any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
        raise _unknown_to_template("messages")
    whole = text(turns, offered)
    if offered and whole == text(turns, []):
        raise _unknown_to_template("tools")
    # One text with marks shows all that the template leaves out: a text for each message would take a thread for hours.
    mark = uuid.uuid4().hex  # nobody can have written it
    numbers = {number for number, turn in enumerate(turns) if "tool_calls" in turn or turn["role"] == "tool"}
    if numbers:
        marked = [
            _marked(turn, f"{mark}_{number}_") if number in numbers else turn for number, turn in enumerate(turns)
        ]
        shown = re.findall(f"{mark}_([0-9]+)_", text(marked, offered))
        if numbers != set(map(int, shown)):
            raise _unknown_to_template("messages")
    return whole


def _offered(asked: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools that the prompt lists, in OpenAI's shape."""
    return [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in asked.offered_tools]


def _check_variables(given: Mapping[str, Any]) -> None:
    """Raise ApiError if a variable for the chat template is an argument of the rendering instead."""
    if taken := sorted(given.keys() & _NO_VARIABLES):
        message = f"chat_template_kwargs.{taken[0]} is not supported: expected variables of the chat template"
        raise ApiError(400, message, param="chat_template_kwargs", code="unsupported_parameter")


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    try:
        return render(tokenizer, turns, tools or None, options)
    except ValueError as error:
        refused = ApiError(400, str(error), param="messages")
    if not any("tool_calls" in turn for turn in turns):
        raise refused
    try:  # some templates, such as DeepSeek's, expect the arguments of calls as text
        return render(tokenizer, list(map(_with_text_arguments, turns)), tools or None, options)
    except ValueError:
        raise refused from None


def _takes_parts_alone(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template omits plain text as content: some models with vision expect parts alone."""
    if not tokenizer.chat_template:
        return False
    probe = {"role": "user", "content": "probe"}
    try:
        return "probe" not in render(tokenizer, [probe]) and "probe" in render(tokenizer, [_in_parts(probe)])
    except ValueError:
        return False


def _in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn["content"]
    return turn | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn


def _with_text_arguments(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    if "tool_calls" not in turn:
        return turn
    calls = copy.deepcopy(turn["tool_calls"])
    for call in calls:
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {**turn, "tool_calls": calls}


def _marked(turn: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return the turn with ``mark`` in the arguments of each call, or else behind the result of a call."""
    if "tool_calls" in turn:
        calls = copy.deepcopy(turn["tool_calls"])
        for call in calls:  # not in the name, in whose place Kimi's template writes the id
            arguments = call["function"]["arguments"]
            marked = arguments | {mark: mark} if isinstance(arguments, dict) else f"{arguments}{mark}"
            call["function"]["arguments"] = marked
        return turn | {"tool_calls": calls}
    content, part = turn["content"], {"type": "text", "text": mark}
    return turn | {"content": content + mark if isinstance(content, str) else [*content, part]}


def _unknown_to_template(param: str) -> ApiError:
    message = f"{param}: tools are not supported with this model, whose chat template leaves them out"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def answer_reader(
    asked: ChatRequest | CompletionRequest, model: ServedModel, prompt: Sequence[int]
) -> AnswerReader | None:
    """Return a reader for an answer to ``prompt``, which are token ids; None if the answer is all text.

    Raise ApiError if the calls' format is unknown.
    """
    if isinstance(asked, CompletionRequest):
        return None
    reasoning = reasoning_of(model.tokenizer, prompt)
    regions = {} if reasoning is None else dict(reasoning.format.regions)
    if asked.offered_tools:
        calls = call_regions(model.tokenizer)
        if not calls:
            raise _unknown_calls("tools")
        regions |= calls
    if not regions:
        return None
    prefix = "" if reasoning is None else reasoning.prefix
    return AnswerReader(regions, _offered(asked), several=asked.parallel_tool_calls, prefix=prefix)


def grammar_of(asked: ChatRequest, model: ServedModel, prompt: Sequence[int]) -> Grammar | None:
    """Return the grammar that the answer to ``prompt`` must follow; None if there is none.

    Reasoning comes before the grammar. Raise ApiError if the grammar cannot be made.
    """
    schemas: dict[str, Any] = {}
    rules, choices = [], []
    reasoning = reasoning_of(model.tokenizer, prompt)
    compiler = model.grammars
    if asked.answer_schema is not None and not asked.must_call:
        schemas["answer"] = asked.answer_schema
        before = () if reasoning is None else reasoning.format.before_answer
        choices.append(" ".join([*map(compiler.literal, before), "answer"]))
    if asked.must_call or (choices and asked.callable_tools):
        calls, arguments = _rules_of_calls(asked, model)
        rules.append(calls)
        schemas |= arguments
        choices.append("calls")
    if not choices:
        return None
    start = " | ".join(choices)
    if reasoning is not None:
        rules.append(reasoning.format.rule("thought", compiler, has_begun=reasoning.has_begun))
        start = f"thought{'' if reasoning.has_begun else '?'} ({start})"
    param = "tools" if "calls" in choices else "response_format"
    return compiler.compile("\n".join([f"start: {start}", *rules]), schemas, param)


def _rules_of_calls(asked: ChatRequest, model: ServedModel) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """Return the rule ``calls`` and those it needs. Raise ApiError if the calls' format is unknown."""
    written = call_format_of(str(model.tokenizer.chat_template or ""))
    if written is None:
        raise _unknown_calls("tool_choice" if asked.must_call else "response_format with tools")
    tools = {tool.name: tool.parameters or _ANY_OBJECT for tool in asked.callable_tools}
    several = asked.parallel_tool_calls and not isinstance(asked.tool_choice, NamedTool)
    return calls_grammar(written, tools, several=several, compiler=model.grammars)


def _unknown_calls(param: str) -> ApiError:
    message = f"{param} is not supported with this model: how it writes calls is not known"
    return ApiError(400, message, param=param, code="unsupported_parameter")
