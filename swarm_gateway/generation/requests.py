"""The requests with OpenAI's fields. All other fields are refused by name, and none is ignored silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import from_json

from swarm_gateway.generation.parts import (
    AllowedTools,
    ChatMessage,
    Fields,
    Function,
    NamedTool,
    ResponseFormat,
    StrictModel,
    Tool,
    Values,
)
from swarm_gateway.limits.admission import ApiError

MOST_CHOICES = 128  # OpenAI's limit for one prompt
_SEEDS = 2**63  # seeds of a generator of torch are below this


_COMMON: dict[str, Values] = {
    "metadata": None,
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "user": None,
    "store": None,  # nothing is stored
}
_CHAT: dict[str, Values] = _COMMON | {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": None,
    "web_search_options": (),
}
_COMPLETION: dict[str, Values] = _COMMON | {"best_of": (1,), "suffix": ("",)}
_EMBEDDING: dict[str, Values] = {"user": None, "dimensions": ()}


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, each chunk has the numbers so far
    include_servers: bool = False  # ours: which servers compute each choice, and what happens to them
    include_obfuscation: Literal[False] = False


Stop = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    Field(max_length=4),
]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Generating(Fields):
    """The fields of both generating endpoints. Where a field is None, the model's generation config has the value."""

    TAKES_FEWER: ClassVar[bool] = False  # answers may be shorter than ``most_tokens`` if the model lacks positions
    DEFAULT_TOKENS: ClassVar[int]  # the longest answer if the request does not say; fewer if fewer positions are left
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop = Field(default=[])
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(default=None, ge=-_SEEDS, lt=_SEEDS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)  # 0 and -1: all tokens
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    repeat_penalty: float | None = Field(default=None, gt=0, le=100)  # the name in llama.cpp and Ollama
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] = Field(default={})
    max_tokens: int | None = Field(default=None, ge=1)
    ignore_eos: bool = False
    service_tier: str = "auto"  # "flex": servers compute other work first; all others are the same
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default=[], max_length=128)

    @model_validator(mode="after")
    def _penalties_that_agree(self) -> _Generating:
        if None is not self.repeat_penalty != self.repetition_penalty is not None:  # both are given, and differ
            message = "repeat_penalty and repetition_penalty differ: expected one of them"
            raise ApiError(400, message, param="repeat_penalty")
        return self

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> _Generating:
        if self.stream_options is not None and not self.stream:
            message = "stream_options is only for streams: expected stream to be true"
            raise ApiError(400, message, param="stream_options")
        return self

    @property
    def num_generations(self) -> int:
        return self.n

    @property
    def is_background(self) -> bool:
        return self.service_tier == "flex"

    @property
    def streamed(self) -> StreamOptions:
        """Return the options of the stream; without any, the defaults."""
        return self.stream_options or StreamOptions()

    def seed_of(self, choice: int) -> int | None:
        """Return the seed of a choice: choices of one request differ, and the same request gives the same choices."""
        return None if self.seed is None else (self.seed + choice) % _SEEDS


class ChatRequest(_Generating):
    UNSUPPORTED = _CHAT
    DEFAULT_TOKENS = 1024
    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = Field(default=[], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _fields_that_agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is given: expected logprobs to be true", param="top_logprobs")
        if None is not self.max_tokens != self.max_completion_tokens is not None:  # both are given, and differ
            raise ApiError(400, "max_tokens and max_completion_tokens differ: expected one of them", param="max_tokens")
        names = [tool.function.name for tool in self.tools]
        if len(names) != len(set(names)):
            raise ApiError(400, "two tools have the same name", param="tools")
        if not set(self._chosen_names) <= set(names):
            raise ApiError(400, "tool_choice names a tool that is not among tools", param="tool_choice")
        if self.must_call and not names:
            raise ApiError(400, "tool_choice is required: expected tools", param="tool_choice")
        return self

    @property
    def _chosen_names(self) -> list[str]:
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [self.tool_choice.function.name] if isinstance(self.tool_choice, NamedTool) else []

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        return None if self.response_format is None else self.response_format.schema_of_answer

    @property
    def offered_tools(self) -> list[Function]:
        """Return the tools that the prompt lists."""
        if self.tool_choice == "none":
            return []
        offered = [tool.function for tool in self.tools]
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in offered if tool.name in self._chosen_names]
        return offered

    @property
    def callable_tools(self) -> list[Function]:
        """Return the tools that the model may call."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.offered_tools if tool.name in self._chosen_names]
        return self.offered_tools

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be a call of a tool."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return mode == "required" or isinstance(mode, NamedTool)

    @property
    def template_options(self) -> dict[str, Any]:
        """Return the variables of the chat template that the request sets, as vLLM does: few templates read them."""
        options: dict[str, Any] = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        if self.reasoning_effort is not None:
            options["enable_thinking"] = self.reasoning_effort != "none"
        return {name: value for name, value in options.items() if value is not None} | self.chat_template_kwargs

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _listed(prompt: Any) -> Any:
    """Return a list of prompts, each a text or token ids."""
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
    prompts = [prompt] if is_one else prompt
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("expected a text, token ids, or a list of these")
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(token) is int for token in each)):
            raise ValueError("expected a text, token ids, or a list of these")
    return prompts


class CompletionRequest(_Generating):
    UNSUPPORTED = _COMPLETION
    DEFAULT_TOKENS = 16  # as with OpenAI
    prompt: Annotated[list[Any], BeforeValidator(_listed), Field(max_length=2048)]
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False
    max_tokens: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _says_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens is 0: expected at least 1, or echo to be true"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_generations(self) -> int:
        return self.n * len(self.prompt)


class EmbeddingRequest(Fields):
    UNSUPPORTED = _EMBEDDING
    model: str
    input: Annotated[list[Any], BeforeValidator(_listed), Field(max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"


R = TypeVar("R", bound=BaseModel)


def parse(kind: type[R], body: bytes, what: str = "the body") -> R:
    """Return the request in ``body``, which errors call ``what``. Raise ApiError if it is not of this kind."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"{what} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"{what} is not a JSON object")
    return validated(kind, fields)


def validated(kind: type[R], fields: Mapping[str, Any]) -> R:
    """Return the request with these fields. Raise ApiError if it is not a request of this kind."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    param = ".".join(map(str, first["loc"])) or None
    if first["type"] == "extra_forbidden":
        raise ApiError(400, f"there is no field {param}", param=param, code="unknown_parameter")
    message = first["msg"].removeprefix("Value error, ")
    raise ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")
