"""Requests with the fields of OpenAI's Responses API, and their translation into chat requests.

Fields without an effect on the text are ignored; all others that are not supported are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from swarm_gateway.generation.parts import Fields, Values, of_types, picture_part, with_pictures_after_results
from swarm_gateway.generation.requests import ChatRequest, validated
from swarm_gateway.limits.admission import ApiError

_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text")
_MOST_ITEMS = 4096
_ITEM: dict[str, Values] = {"id": None, "status": None, "phase": None}
_CALL: dict[str, Values] = _ITEM | {"caller": ({"type": "direct"},), "async": (False,)}
_FUNCTION: dict[str, Values] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": None,
}
_REASONING: dict[str, Values] = _ITEM | {"encrypted_content": None, "summary": None}
_EFFORT: dict[str, Values] = {"summary": None, "generate_summary": None}
_REQUEST: dict[str, Values] = {
    "access_programs": None,
    "background": (False,),
    "client_metadata": None,
    "context_management": None,  # what a long conversation may leave out
    "conversation": (),
    "image": None,
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": None,  # of tools that OpenAI's servers run
    "moderation": (),
    "prompt": (),
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "user": None,
}


def _joined(content: Any) -> Any:
    """Return the text of content that comes in parts. Raise ApiError if a part is no text."""
    found = _with_pictures(content)
    if isinstance(found, list):
        raise ApiError(400, "content of type 'input_image' is not supported here: expected text", param="input")
    return found


def _with_pictures(content: Any) -> Any:
    """Return content in OpenAI's older form: text, or parts if there are pictures. Raise ApiError for other parts."""
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append(picture_part(part["image_url"]))
        elif kind == "image_url":  # in a stored response
            parts.append(part)
        elif kind in _TEXTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            message = f"content of type {kind!r} is not supported: expected text, or input_image with an image_url"
            raise ApiError(400, message, param="input")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


Text = Annotated[str, BeforeValidator(_joined)]
Content = Annotated[str | list[dict[str, Any]], BeforeValidator(_with_pictures)]


class MessageItem(Fields):
    UNSUPPORTED = _ITEM
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Fields):
    UNSUPPORTED = _CALL
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        return _full_name(self.namespace, self.name)


class ResultItem(Fields):
    UNSUPPORTED = _CALL
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Fields):
    UNSUPPORTED = _REASONING
    type: Literal["reasoning"]
    content: Text = ""


def _full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function, which is unique among all namespaces."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]
_items: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def _listed(given: Any) -> Any:
    """Return the input as a list of items with types. Raise ApiError if the type of one is not supported."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    found = [{"type": "message"} | item if isinstance(item, dict) else item for item in given]
    items = [item for item in found if isinstance(item, dict)]
    of_types(_ITEMS, items, what="an item", expected=", ".join(_ITEMS), param="input")
    return found


def items_of(stored: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return the items of requests and responses that were stored."""
    return _items.validate_python(stored)


_tools = partial(of_types, what="a tool", expected="functions, which the client runs", param="tools")


class FunctionTool(Fields):
    UNSUPPORTED = _FUNCTION
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}

    def functions(self) -> Iterator[tuple[str | None, FunctionTool]]:
        """Yield the function, which belongs to no namespace."""
        yield None, self


class NamespaceTool(Fields):
    """Functions that belong together. Their calls say the namespace, and the model sees it in their names."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[FunctionTool], BeforeValidator(partial(_tools, ("function",))), Field(min_length=1)]

    def functions(self) -> Iterator[tuple[str | None, FunctionTool]]:
        """Yield the namespace's name with each function; the first function also has the namespace's description."""
        about = self.description
        for function in self.tools:
            said = "\n\n".join(filter(None, [about, function.description])) or None
            yield self.name, function.model_copy(update={"description": said})
            about = None


AnyTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class NamedFunction(Fields):
    type: Literal["function"]
    name: str

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(Fields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1)

    def as_chat(self) -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("expected schema with the type json_schema, and with no other")
        return self


class TextConfig(Fields):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Fields):
    UNSUPPORTED = _EFFORT
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(Fields):
    UNSUPPORTED = _REQUEST
    model: str
    input: Annotated[list[Item], BeforeValidator(_listed), Field(max_length=_MOST_ITEMS)] = Field(default=[])
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[AnyTool], BeforeValidator(partial(_tools, ("function", "namespace")))] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    metadata: dict[str, str] = Field(default={})
    service_tier: str = "auto"

    @property
    def _functions(self) -> dict[str, tuple[str | None, FunctionTool]]:
        """Return the namespace and the tool of each function, by the name by which the model knows the function."""
        pairs = [pair for tool in self.tools for pair in tool.functions()]
        found = {_full_name(namespace, function.name): (namespace, function) for namespace, function in pairs}
        if len(found) != len(pairs):
            raise ApiError(400, "two tools have the same name", param="tools")
        return found

    def name_of_call(self, full_name: str) -> dict[str, str]:
        """Return the fields that name a function in a call: its name, and its namespace if it has one."""
        namespace, function = self._functions[full_name]
        return {"name": function.name} | ({} if namespace is None else {"namespace": namespace})

    def as_chat(self, before: Sequence[Item]) -> ChatRequest:
        """Return the chat request that says the same after the items ``before``. Raise ApiError if there is none."""
        turns = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice = self.tool_choice
        fields = {
            "model": self.model,
            "messages": [*turns, *with_pictures_after_results(_turns([*before, *self.input]))],
            "stream": self.stream,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [
                function.model_copy(update={"name": name}).as_chat() for name, (_, function) in self._functions.items()
            ],
            "tool_choice": choice if isinstance(choice, str) else choice.as_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "service_tier": self.service_tier,
            "response_format": None if self.text.format is None else self.text.format.as_chat(),
        }
        return validated(_Chat, fields)

    def echoed(self) -> dict[str, Any]:
        """Return the fields that a response repeats."""
        fields = self.model_dump(mode="json", by_alias=True, exclude={"input", "stream"})
        fields["text"]["format"] = fields["text"]["format"] or {"type": "text"}
        return fields | {"truncation": "disabled", "background": False}

    def stored_input(self) -> list[dict[str, Any]]:
        return [item.model_dump(mode="json", exclude_none=True) for item in self.input]


class _Chat(ChatRequest):
    """A chat request whose answer may be long: coding assistants do not say how long it may be."""

    DEFAULT_TOKENS = 2**17  # as the largest of OpenAI's models


def _turns(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat request. Reasoning and calls become part of one message of the assistant."""
    turns: list[dict[str, Any]] = []
    thoughts = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thoughts += item.content
            continue
        last: dict[str, Any] = turns[-1] if turns else {"role": ""}
        if isinstance(item, ResultItem):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, CallItem):
            if last["role"] != "assistant":
                last = {"role": "assistant", "content": ""}
                turns.append(last)
            call = {"id": item.call_id, "function": {"name": item.full_name, "arguments": item.arguments}}
            last.setdefault("tool_calls", []).append(call)
        else:
            last = {"role": item.role, "content": item.content}
            turns.append(last)
        if thoughts and turns[-1]["role"] == "assistant":
            turns[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return turns
