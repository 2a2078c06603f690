"""What may be asked for, in OpenAI's fields, and the refusal of all else: by name, and nothing silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from swarm_client.gateway.admission import ApiError

MOST_CHOICES = 128  # OpenAI's, of one prompt
_SEEDS = 2**63  # of a generator of torch


def _unsupported(name: str, values: tuple[Any, ...]) -> ApiError:
    expected = f"leave it out, or give {' or '.join(map(repr, values))}" if values else "leave it out"
    return ApiError(400, f"{name} is not supported: {expected}", param=name, code="unsupported_parameter")


_Values: TypeAlias = tuple[Any, ...] | None  # with which a field that is not supported does nothing; None: all
_COMMON: dict[str, _Values] = {
    "metadata": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "user": None,
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_CHAT: dict[str, _Values] = _COMMON | {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": None,
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_COMPLETION: dict[str, _Values] = _COMMON | {"best_of": (1,), "echo": (False,), "suffix": ("",)}
_MESSAGE: dict[str, _Values] = {  # clients send answers back as they came
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}


def _supported(fields: Mapping[str, Any], known: Mapping[str, Any], others: Mapping[str, _Values]) -> Any:
    """Those that mean something; null is as if the field were not there. Raises ApiError for what is not supported."""
    found = {}
    for name, value in fields.items():
        if name in others:
            harmless = others[name]
            if value is not None and harmless is not None and value not in harmless:
                raise _unsupported(name, harmless)
        elif value is not None or name not in known:
            found[name] = value
    return found


def _joined(content: Any) -> Any:
    """Text that comes in parts. Raises ApiError if one of them is no text."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ApiError(400, f"content of type {kind!r} is not supported: expected text", param="messages")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ApiError(400, 'a part of content is not {"type": "text", "text": "…"}', param="messages")
    return "".join(part["text"] for part in content)


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined)]

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, fields: Any) -> Any:
        return _supported(fields, cls.model_fields, _MESSAGE) if isinstance(fields, dict) else fields

    def as_turn(self) -> dict[str, str]:
        """For a chat template; few of them know developers, whose place is that of the system."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


Stop = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    Field(max_length=4),
]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Generating(BaseModel):
    """What both endpoints take. ``None``: as the model's generation config has it."""

    UNSUPPORTED: ClassVar[Mapping[str, _Values]]
    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop = []
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(default=None, ge=-_SEEDS, lt=_SEEDS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)  # 0: all tokens
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] = {}
    max_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, fields: Any) -> Any:
        return _supported(fields, cls.model_fields, cls.UNSUPPORTED)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> _Generating:
        if self.stream_options is not None and not self.stream:
            message = "stream_options is only for streams: expected stream to be true"
            raise ApiError(400, message, param="stream_options")
        return self

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def seed_of(self, choice: int) -> int | None:
        """Choices of one request differ, and are the same whenever the request is."""
        return None if self.seed is None else (self.seed + choice) % _SEEDS


class ChatRequest(_Generating):
    UNSUPPORTED: ClassVar[Mapping[str, _Values]] = _CHAT
    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _fields_that_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is given: expected logprobs to be true", param="top_logprobs")
        if None is not self.max_tokens != self.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: expected one of them", param="max_tokens")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _listed(prompt: Any) -> Any:
    """A list of prompts, each a text or token ids."""
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
    prompts = [prompt] if is_one else prompt
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("expected a text, token ids, or a list of these")
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(token) is int for token in each)):
            raise ValueError("expected a text, token ids, or a list of these")
    return prompts


class CompletionRequest(_Generating):
    UNSUPPORTED: ClassVar[Mapping[str, _Values]] = _COMPLETION
    prompt: Annotated[list[Any], BeforeValidator(_listed), Field(max_length=2048)]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


R = TypeVar("R", bound=BaseModel)


def parse(kind: type[R], body: bytes) -> R:
    """Raises ApiError if it is no such request."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    param = ".".join(map(str, first["loc"])) or None
    if first["type"] == "extra_forbidden":
        raise ApiError(400, f"there is no field {param}", param=param, code="unknown_parameter")
    message = first["msg"].removeprefix("Value error, ")
    raise ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")
