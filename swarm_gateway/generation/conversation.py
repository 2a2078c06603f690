"""A conversation as the text of a model's chat template, and the grammar of its next answer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from swarm_client.generation.templates import render
from swarm_gateway.generation.parts import NamedTool
from swarm_gateway.generation.requests import ChatRequest
from swarm_gateway.generation.tools import CallReader, calls_grammar, format_of, region_of
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
    offered = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in asked.offered_tools]
    text = partial(_rendered, tokenizer, asked.template_options)
    if not tokenizer.chat_template and any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
        raise _unknown_to_template("messages")
    whole = text(turns, offered)
    if offered and whole == text(turns, []):
        raise _unknown_to_template("tools")
    for number, turn in enumerate(turns):
        other = _other_turn(turn)
        if other is not None and whole == text([*turns[:number], other, *turns[number + 1 :]], offered):
            raise _unknown_to_template("messages")
    return whole


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
        raise ApiError(400, str(error), param="messages") from None


def _other_turn(turn: dict[str, Any]) -> dict[str, Any] | None:
    """Return the turn without its call, or with another result: the text must differ. None if it has neither."""
    if "tool_calls" in turn:
        return {name: value for name, value in turn.items() if name != "tool_calls"}
    return turn | {"content": turn["content"] + "?"} if turn["role"] == "tool" else None


def _unknown_to_template(param: str) -> ApiError:
    message = f"{param}: tools are not supported with this model, whose chat template leaves them out"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def call_reader(asked: ChatRequest, model: ServedModel) -> CallReader | None:
    """Return a reader for one answer; None if it can have no calls. Raise ApiError if the calls' format is unknown."""
    if not asked.offered_tools:
        return None
    region = region_of(model.tokenizer)
    if region is None:
        raise _unknown_calls("tools")
    return CallReader(region, {tool.name for tool in asked.offered_tools}, several=asked.parallel_tool_calls)


def grammar_of(asked: ChatRequest, model: ServedModel) -> Grammar | None:
    """Return the grammar that the answer must follow; None if there is none. Raise ApiError if it cannot be made."""
    answers = {} if asked.answer_schema is None or asked.must_call else {"answer": asked.answer_schema}
    if asked.must_call or (answers and asked.callable_tools):
        return _grammar_with_calls(asked, model, answers)
    return model.grammars.compile("start: answer", answers, "response_format") if answers else None


def _grammar_with_calls(asked: ChatRequest, model: ServedModel, answers: Mapping[str, Any]) -> Grammar:
    """Return the grammar of calls, or of these answers and calls. Raise ApiError if the calls' format is unknown."""
    written = format_of(str(model.tokenizer.chat_template or ""))
    if written is None:
        raise _unknown_calls("tool_choice" if asked.must_call else "response_format with tools")
    tools = asked.callable_tools
    arguments = {tool.name: f"arguments{number}" for number, tool in enumerate(tools)}
    schemas = {arguments[tool.name]: tool.parameters or _ANY_OBJECT for tool in tools}
    several = asked.parallel_tool_calls and not isinstance(asked.tool_choice, NamedTool)
    rules = calls_grammar(written, arguments, several=several, compiler=model.grammars)
    start = "start: answer | calls" if answers else "start: calls"
    return model.grammars.compile(f"{start}\n{rules}", {**answers, **schemas}, "tools")


def _unknown_calls(param: str) -> ApiError:
    message = f"{param} is not supported with this model: how it writes calls is not known"
    return ApiError(400, message, param=param, code="unsupported_parameter")
