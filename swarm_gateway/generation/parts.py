"""Parts of requests: messages, tools, and the format that an answer must have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json

from swarm_gateway.limits.admission import ApiError

_NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # OpenAI's pattern for names of tools
Values: TypeAlias = tuple[Any, ...] | None  # the values with which an unsupported field is ignored; None: all values


def _unsupported(name: str, values: tuple[Any, ...]) -> ApiError:
    expected = f"leave it out, or give {' or '.join(map(repr, values))}" if values else "leave it out"
    return ApiError(400, f"{name} is not supported: {expected}", param=name, code="unsupported_parameter")


_MESSAGE: dict[str, Values] = {  # fields that clients send back with an answer
    "annotations": ([],),
    "audio": (),
    "cache_control": None,
    "function_call": (),
    "refusal": (),
}


def supported(fields: Mapping[str, Any], known: Mapping[str, Any], others: Mapping[str, Values]) -> Any:
    """Return the fields that are supported; null counts as absent. Raise ApiError for an unsupported field or value."""
    found = {}
    for name, value in fields.items():
        if name in others:
            harmless = others[name]
            if value is not None and harmless is not None and value not in harmless:
                raise _unsupported(name, harmless)
        elif value is not None or name not in known:
            found[name] = value
    return found


class StrictModel(BaseModel):
    """A part of a request with no other fields than its own, in which null is not the same as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Fields(StrictModel):
    """Fields of a request. Those in ``UNSUPPORTED`` are accepted if their value changes nothing; others are refused."""

    UNSUPPORTED: ClassVar[Mapping[str, Values]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, fields: Any) -> Any:
        return supported(fields, cls.model_fields, cls.UNSUPPORTED) if isinstance(fields, dict) else fields


class TextPart(Fields):
    UNSUPPORTED = {"cache_control": None}
    type: Literal["text"]
    text: str


class PictureUrl(Fields):
    UNSUPPORTED = {"detail": None}
    url: str


class PicturePart(Fields):
    UNSUPPORTED = {"cache_control": None}
    type: Literal["image_url"]
    image_url: PictureUrl


def of_types(kinds: Collection[str | None], entries: Any, *, what: str, expected: str, param: str) -> Any:
    """Return the entries of a list in a request. Raise ApiError if the type of one is none of ``kinds``."""
    for entry in entries if isinstance(entries, list) else []:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if kind not in kinds:
            raise ApiError(400, f"{what} of type {kind!r} is not supported: expected {expected}", param=param)
    return entries


def picture_part(url: str) -> dict[str, Any]:
    """Return a part of content that shows the picture at ``url``."""
    return {"type": "image_url", "image_url": {"url": url}}


def with_pictures_after_results(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat request with pictures in messages of the user alone, as chat templates expect.

    The pictures in results of tools come at the beginning of the user's next message, or in one of their own.
    """
    found: list[dict[str, Any]] = []
    pictures: list[dict[str, Any]] = []
    for turn in turns:
        content = turn["content"]
        if turn["role"] == "tool" and isinstance(content, list):
            pictures += [part for part in content if part["type"] == "image_url"]
            turn = turn | {"content": "".join(part["text"] for part in content if part["type"] == "text")}
        elif turn["role"] == "user" and pictures:
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            turn, pictures = turn | {"content": [*pictures, *parts]}, []
        elif turn["role"] != "tool" and pictures:
            found.append({"role": "user", "content": pictures})
            pictures = []
        found.append(turn)
    return [*found, {"role": "user", "content": pictures}] if pictures else found


def _joined(content: Any) -> Any:
    """Return the text of content whose parts are all text. Raise ApiError if a part is neither text nor a picture."""
    if not isinstance(content, list):
        return content
    for part in content:
        _check_part(part)
    is_text = all(part["type"] == "text" for part in content)
    return "".join(part["text"] for part in content) if is_text else content


def _check_part(part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        form = '{"type": "text", "text": "…"}'
        is_right = part.keys() - {"cache_control"} == {"type", "text"} and isinstance(part["text"], str)
    elif kind == "image_url":
        form = '{"type": "image_url", "image_url": {"url": "data:image/…"}}'
        shown = part.get("image_url")
        is_right = isinstance(shown, dict) and isinstance(shown.get("url"), str)
    else:
        message = f"content of type {kind!r} is not supported: expected text or image_url"
        raise ApiError(400, message, param="messages")
    if not is_right:
        raise ApiError(400, f"a part of content is not {form}", param="messages")


Part = Annotated[TextPart | PicturePart, Field(discriminator="type")]


class CalledFunction(StrictModel):
    """The function of a call. Its ``arguments`` are JSON, or text that a model wrote in the place of JSON."""

    name: str
    arguments: str


class MessageToolCall(StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in a stream's chunks, which clients send back


class ChatMessage(Fields):
    UNSUPPORTED = _MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[Part] | None, BeforeValidator(_joined)] = None
    tool_calls: list[MessageToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None  # clients send it back with an answer

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are an assistant's")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("expected tool_call_id in messages of tools, and in no others")
        if self.content is None and not self.tool_calls:
            raise ValueError("expected content")
        if self.pictures and self.role != "user":
            raise ValueError("pictures are a user's")
        return self

    @property
    def pictures(self) -> list[str]:
        """Return the URLs of the message's pictures."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, PicturePart)]

    def as_turn(self) -> dict[str, Any]:
        """Return the message for a chat template. A developer becomes the system, as few templates know developers."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        turn["content"] = self.content or ""
        if isinstance(self.content, list):  # the form in which chat templates of models that see take it
            turn["content"] = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in self.content
            ]
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": object_of(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
            if not self.content and self.reasoning_content is not None:
                turn["thinking"] = self.reasoning_content  # the name in gpt-oss's template, which takes no content too
        optional = {
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "reasoning_content": self.reasoning_content,
        }
        return turn | {name: value for name, value in optional.items() if value is not None}


def object_of(text: str) -> Any:
    """Return arguments as an object, as chat templates expect; text that is no JSON object stays text."""
    if not text.strip():  # some clients send a call without arguments like this
        return {}
    try:
        found = from_json(text)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


class Function(StrictModel):
    """A tool's function. ``strict`` has no effect, because constrained arguments always follow the schema."""

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


class ToolSubset(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


class NamedSchema(StrictModel):
    """A named JSON schema. ``strict`` has no effect, because the answer always follows the schema."""

    model_config = ConfigDict(populate_by_name=True)
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected json_schema with the type json_schema, and with no other")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer must follow; None if any text is allowed."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None
