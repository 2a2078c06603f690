"""Requests with the fields of Ollama's API, and their translation into chat and completion requests.

Fields that only say how a machine should compute are ignored; all others that are not supported are refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from swarm_gateway.generation.parts import Fields, Tool, Values, picture_part
from swarm_gateway.generation.requests import ChatRequest, CompletionRequest, Stop, validated

_UNLIMITED = 1 << 16  # tokens of an answer of which the request says that it has no limit
_MACHINE = (
    *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep"),
    *("num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
)
_OPTIONS: dict[str, Values] = {
    **dict.fromkeys(_MACHINE),
    "mirostat": (0,),
    "mirostat_eta": None,
    "mirostat_tau": None,
    "penalize_newline": None,
    "repeat_last_n": None,  # penalties count all tokens
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
}
_KEPT: dict[str, Values] = {"keep_alive": None, "options": None}
_COMMON: dict[str, Values] = {"keep_alive": None, "logprobs": (False,), "top_logprobs": (0,)}
_GENERATE: dict[str, Values] = _COMMON | {
    "context": ([],),
    "height": (0,),
    "images": ([],),
    "steps": (0,),
    "suffix": ("",),
    "template": ("",),
    "width": (0,),
}
_EMBED: dict[str, Values] = _KEPT | {"dimensions": (), "truncate": None}
_SHOW: dict[str, Values] = {"verbose": None}


class Options(Fields):
    UNSUPPORTED = _OPTIONS
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop = Field(default=[])
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def as_openai(self) -> dict[str, Any]:
        fields = self.model_dump(exclude={"num_predict"}, exclude_none=True)
        most = self.num_predict
        return fields if most is None else fields | {"max_tokens": _UNLIMITED if most < 0 else most}


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    id: str | None = None
    function: FunctionCall


class OllamaMessage(Fields):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: list[str] = Field(default=[])  # base64
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] = Field(default=[])
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Generating(Fields):
    model: str
    stream: bool = True
    format: Annotated[
        Literal["json"] | dict[str, Any] | None, BeforeValidator(lambda value: None if value == "" else value)
    ] = None
    options: Options = Options()
    think: bool | Literal["low", "medium", "high", "max"] | None = None

    def _fields(self) -> dict[str, Any]:
        found = {"model": self.model, "stream": self.stream} | self.options.as_openai()
        if self.format is not None:
            schema = {"type": "json_schema", "json_schema": {"schema": _closed(self.format)}}
            found["response_format"] = {"type": "json_object"} if self.format == "json" else schema
        if isinstance(self.think, str):
            found["reasoning_effort"] = self.think
        elif self.think is not None:
            found["chat_template_kwargs"] = {"enable_thinking": self.think}
        return found


class ChatCall(_Generating):
    """A request to ``/api/chat``. Without messages, it only loads the model."""

    UNSUPPORTED = _COMMON
    messages: list[OllamaMessage] = Field(default=[])
    tools: list[Tool] = Field(default=[])

    def as_openai(self) -> ChatRequest | None:
        """Return the chat request that says the same, None without messages. Raise ApiError if there is none."""
        if not self.messages:
            return None
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return validated(_Chat, self._fields() | {"messages": _turns(self.messages), "tools": tools})


class GenerateCall(_Generating):
    """A request to ``/api/generate``. Without a prompt, it only loads the model."""

    UNSUPPORTED = _GENERATE
    prompt: str = ""
    system: str = ""
    raw: bool = False

    def as_openai(self) -> ChatRequest | CompletionRequest | None:
        """Return the request that says the same, None without prompt. Raise ApiError if there is none."""
        if not self.prompt:
            return None
        fields = self._fields()
        if self.raw:
            return validated(_Completion, {"max_tokens": ChatRequest.DEFAULT_TOKENS} | fields | {"prompt": self.prompt})
        turns = [{"role": "system", "content": self.system}] if self.system else []
        return validated(_Chat, fields | {"messages": [*turns, {"role": "user", "content": self.prompt}]})


class EmbedCall(Fields):
    UNSUPPORTED = _EMBED
    model: str
    input: str | list[str]


class OldEmbedCall(Fields):
    UNSUPPORTED = _KEPT
    model: str
    prompt: str


class ShowCall(Fields):
    UNSUPPORTED = _SHOW
    model: str = ""
    name: str = ""  # older clients give the name here

    @model_validator(mode="after")
    def _says_which(self) -> ShowCall:
        if not (self.model or self.name):
            raise ValueError("expected the name of a model")
        return self


class _Chat(ChatRequest):
    TAKES_FEWER = True


class _Completion(CompletionRequest):
    TAKES_FEWER = True


def _closed(schema: Any) -> Any:
    """Return the JSON schema with objects that have no other properties unless it says so, as with Ollama."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return closed | {name: _closed(part) for name, part in schema.items()}


def _turns(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages of a chat request. Ollama's calls have no ids: their results are found by name or order."""
    turns: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    num_calls = 0
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            turn["tool_calls"] = []
        for call in message.tool_calls:
            num_calls += 1
            # Some chat templates, such as Mistral's, require ids of nine letters or digits.
            waiting.append((call.id or f"{num_calls:09d}", call.function.name))
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            turn["tool_calls"].append({"id": waiting[-1][0], "function": function})
        if message.role == "tool":
            turn["tool_call_id"] = message.tool_call_id or _id_of_call(waiting, message.tool_name)
            waiting = [call for call in waiting if call[0] != turn["tool_call_id"]]
            if message.tool_name is not None:
                turn["name"] = message.tool_name
        turns.append(turn)
    return turns


def _content(message: OllamaMessage) -> str | list[dict[str, Any]]:
    """Return the content of a message in OpenAI's form. Ollama's pictures come before the text, in any format."""
    if not message.images:
        return message.content
    pictures = [picture_part(f"data:image/any;base64,{data}") for data in message.images]
    return [*pictures, {"type": "text", "text": message.content}]


def _id_of_call(waiting: list[tuple[str, str]], name: str | None) -> str:
    own = [call_id for call_id, called in waiting if name in (None, called)]
    return next(iter([*own, *(call_id for call_id, _ in waiting)]), "0" * 9)
