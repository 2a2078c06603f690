"""Requests with the fields of Anthropic's Messages API, and their translation into chat requests.

Fields without an effect on the text are ignored; all others that are not supported are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from swarm_gateway.generation.parts import Fields, Values, of_types, picture_part, with_pictures_after_results
from swarm_gateway.generation.requests import ChatRequest, validated
from swarm_gateway.limits.admission import ApiError

_MOST_STOPS = 64
_BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")
_PART: dict[str, Values] = {"cache_control": None}
_TEXT: dict[str, Values] = _PART | {"citations": ([],)}
_CALL: dict[str, Values] = _PART | {"caller": ({"type": "direct"},)}
_TOOL: dict[str, Values] = _PART | {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": None,
    "input_examples": None,
}
_COUNT: dict[str, Values] = _PART | {"speed": None, "user_profile_id": None}
_MESSAGES: dict[str, Values] = _COUNT | {
    "container": (),
    "context_management": None,  # what a long conversation may leave out
    "diagnostics": None,
    "inference_geo": None,
    "mcp_servers": ([],),
    "metadata": None,
    "service_tier": None,
}


class _Part(Fields):
    UNSUPPORTED = _PART


class TextBlock(_Part):
    UNSUPPORTED = _TEXT
    type: Literal["text"]
    text: str

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


def _only_blocks(kinds: tuple[str, ...], content: Any) -> Any:
    """Return content as a list of blocks. Raise ApiError if a block is of another type."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return of_types(kinds, content, what="content", expected=" or ".join(kinds), param="messages")


TextBlocks = Annotated[list[TextBlock], BeforeValidator(partial(_only_blocks, ("text",)))]


class PictureSource(_Part):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class PictureBlock(_Part):
    UNSUPPORTED = _CALL
    type: Literal["image"]
    source: PictureSource

    @property
    def part(self) -> dict[str, Any]:
        return picture_part(f"data:{self.source.media_type};base64,{self.source.data}")


class ToolUseBlock(_Part):
    UNSUPPORTED = _CALL
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Part):
    """The result of a call. ``is_error`` has no effect, because no chat template has a place for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[Annotated[TextBlock | PictureBlock, Field(discriminator="type")]],
        BeforeValidator(partial(_only_blocks, ("text", "image"))),
    ] = Field(default=[])
    is_error: bool = False

    def turn(self) -> dict[str, Any]:
        content = [block.part for block in self.content]
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


class ThinkingBlock(_Part):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Part):
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | PictureBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(_Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(partial(_only_blocks, _BLOCKS)), Field(min_length=1)]

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> AnthropicMessage:
        own = {"user": (TextBlock, PictureBlock, ToolResultBlock), "system": (TextBlock,)}.get(self.role)
        for block in self.content:
            if isinstance(block, ToolResultBlock | PictureBlock) if own is None else not isinstance(block, own):
                raise ValueError(f"a block of type {block.type} does not belong to the role {self.role}")
        return self

    def turns(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of a chat request that say the same."""
        if self.role == "assistant":
            yield self._answer()
            return
        parts: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, TextBlock | PictureBlock):
                parts.append(block.part)
            elif isinstance(block, ToolResultBlock):
                if parts:
                    yield {"role": self.role, "content": parts}
                yield block.turn()
                parts = []
        if parts or not any(isinstance(block, ToolResultBlock) for block in self.content):
            yield {"role": self.role, "content": parts}

    def _answer(self) -> dict[str, Any]:
        turn: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(block.text for block in self.content if isinstance(block, TextBlock)),
        }
        if thoughts := "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock)):
            turn["reasoning_content"] = thoughts
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        if calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
                }
                for call in calls
            ]
        return turn


class AnthropicTool(_Part):
    UNSUPPORTED = _TOOL
    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def as_function(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | {"strict": self.strict}}


# Other tools are run by Anthropic's servers.
_custom_tools = partial(
    of_types, (None, "custom"), what="a tool", expected="tools with a name and an input_schema", param="tools"
)


class ToolChoice(_Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_of_a_tool(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("expected a name with the type tool, and with no other")
        return self

    def as_openai(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class JsonFormat(_Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Thinking(BaseModel):
    """The setting whether the model thinks first. Few chat templates know it, and none limits how long it thinks."""

    type: str


class MessagesPrompt(_Part):
    """The fields that say what the model reads."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: TextBlocks = Field(default=[])
    tools: Annotated[list[AnthropicTool], BeforeValidator(_custom_tools)] = Field(default=[])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> MessagesPrompt:
        if self.messages[-1].role == "assistant":
            message = "the last message is the assistant's: expected the user's, as answers cannot be continued"
            raise ApiError(400, message, param="messages")
        return self

    def _fields(self) -> dict[str, Any]:
        """Return the fields of a chat request."""
        turns = with_pictures_after_results(turn for message in self.messages for turn in message.turns())
        if self.system:
            turns.insert(0, {"role": "system", "content": "\n\n".join(block.text for block in self.system)})
        found: dict[str, Any] = {"model": self.model, "messages": turns}
        if self.tools:
            found["tools"] = [tool.as_function() for tool in self.tools]
        if self.tool_choice is not None:
            found["tool_choice"] = self.tool_choice.as_openai()
            found["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            found["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        if self.output_config is not None:
            found["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                schema = {"schema": self.output_config.format.schema_}
                found["response_format"] = {"type": "json_schema", "json_schema": schema}
        return found

    def as_chat(self) -> ChatRequest:
        """Return the chat request that says the same. Raise ApiError if there is none."""
        return validated(_Chat, self._fields())


class CountRequest(MessagesPrompt):
    UNSUPPORTED = _COUNT


class MessagesRequest(MessagesPrompt):
    UNSUPPORTED = _MESSAGES
    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=_MOST_STOPS)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def _fields(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        rest = {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "stream": self.stream}
        return super()._fields() | sampling | rest


class _Chat(ChatRequest):
    """A chat request whose ``max_tokens`` is a bound that clients must give, however few positions the model has."""

    TAKES_FEWER = True
    stop: list[str] = Field(default=[], max_length=_MOST_STOPS)
