"""Answers in the shapes of OpenAI's Responses API: whole, and as the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from swarm_gateway.answers.answer_reader import ToolCall
from swarm_gateway.generation.generating import Delta
from swarm_gateway.responses_api.requests import ResponsesRequest
from swarm_gateway.web.http import COMMENT, EVENT_STREAM, OPENAI, Dialect, as_json


def _event(content: Any) -> bytes:
    """Return an event. The body of an error is one too, in the shape of errors and in that of events."""
    if "error" in content and "type" not in content:
        content = {"type": "error"} | {**content["error"], "type": "error"} | content
    return f"event: {content['type']}\ndata: ".encode() + as_json(content) + b"\n\n"


RESPONSES = Dialect(EVENT_STREAM, _event, OPENAI.error, COMMENT)


class ResponseWriter:
    """The writer of one response. A response has reasoning, a message, calls of functions, or several of these."""

    def __init__(self, asked: ResponsesRequest, model: str, num_prompt: int) -> None:
        """Begin a response to a prompt of ``num_prompt`` tokens."""
        self._head = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            **asked.echoed(),
            "model": model,
            "error": None,
        }
        self._asked = asked
        self._num_prompt = num_prompt
        self._num_events = 0
        self._done: list[dict[str, Any]] = []  # items that are complete
        self._open: _Message | _Reasoning | None = None  # the open item
        self._space = ""  # white space that is not sent before other text comes
        self.final: dict[str, Any] | None = None  # the response, once it is complete

    def events(self, delta: Delta, num_generated: int, num_reasoning: int) -> Iterator[dict[str, Any]]:
        """Yield the events of one piece. The first piece also has the stream's beginning, and the last one its end."""
        if not self._num_events:
            yield from self._begin()
        is_last = delta.finish is not None
        if delta.reasoning:
            yield from self._add(_Reasoning, delta.reasoning)
        is_empty = is_last and not (delta.calls or self._done or self._open)
        text = self._space + delta.text
        if isinstance(self._open, _Message) or text.strip() or is_empty:
            yield from self._add(_Message, text)
        else:
            self._space = text
        for call in delta.calls:
            yield from self._close("completed")
            yield from self._call(call)
        if is_last:
            status = "incomplete" if delta.finish == "length" else "completed"
            yield from self._end(status, num_generated, num_reasoning)

    def _begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered(kind, response=self._response("in_progress"))

    def _end(self, status: str, num_generated: int, num_reasoning: int) -> Iterator[dict[str, Any]]:
        yield from self._close(status)
        self.final = self._response(status, num_generated, num_reasoning)
        yield self._numbered(f"response.{status}", response=self.final)

    def _response(self, status: str, num_generated: int | None = None, num_reasoning: int = 0) -> dict[str, Any]:
        usage = None
        if num_generated is not None:
            usage = {
                "input_tokens": self._num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_generated,
                "output_tokens_details": {"reasoning_tokens": num_reasoning},
                "total_tokens": self._num_prompt + num_generated,
            }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        rest = {"status": status, "incomplete_details": details, "output": list(self._done), "usage": usage}
        return self._head | rest

    def _numbered(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _add(self, kind: type[_Message | _Reasoning], text: str) -> Iterator[dict[str, Any]]:
        """Add text to the open item, or to a new one if the open one is of another kind."""
        if type(self._open) is not kind:
            yield from self._close("completed")
            self._open = kind()
            begun = self._open.item("in_progress", [])
            yield self._numbered("response.output_item.added", output_index=len(self._done), item=begun)
            place = self._open.place(len(self._done))
            yield self._numbered("response.content_part.added", **place, part=self._open.part())
        self._space = ""
        if text:
            self._open.add(text)
            place = self._open.place(len(self._done))
            yield self._numbered(f"response.{kind.PART}.delta", **place, delta=text, **kind.MORE)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        self._space = ""
        if self._open is None:
            return
        part, place = self._open.part(), self._open.place(len(self._done))
        yield self._numbered(f"response.{self._open.PART}.done", **place, text=self._open.text, **self._open.MORE)
        yield self._numbered("response.content_part.done", **place, part=part)
        yield self._ended(self._open.item(status, [part]))
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        item = {"type": "function_call", "id": _new_id("fc"), "call_id": call.id, **self._asked.name_of_call(call.name)}
        index, place = len(self._done), {"item_id": item["id"], "output_index": len(self._done)}
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._numbered("response.output_item.added", output_index=index, item=begun)
        yield self._numbered("response.function_call_arguments.delta", **place, delta=call.arguments)
        said = {"arguments": call.arguments, "name": item["name"]}
        yield self._numbered("response.function_call_arguments.done", **place, **said)
        yield self._ended(item | {"arguments": call.arguments, "status": "completed"})

    def _ended(self, item: dict[str, Any]) -> dict[str, Any]:
        self._done.append(item)
        return self._numbered("response.output_item.done", output_index=len(self._done) - 1, item=item)


class _Text:
    """An item of a response that has text."""

    PART: ClassVar[str]  # the type of the part that has the text
    MORE: ClassVar[Mapping[str, Any]] = {}  # what events say besides

    def __init__(self, item_id: str) -> None:
        self._id, self.text = item_id, ""

    def add(self, text: str) -> None:
        self.text += text

    def place(self, index: int) -> dict[str, Any]:
        """Return where the text is; ``index`` is that of the item."""
        return {"item_id": self._id, "output_index": index, "content_index": 0}

    def part(self) -> dict[str, Any]:
        return {"type": self.PART, "text": self.text}

    def item(self, status: str, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "status": status, "content": list(content)}


class _Message(_Text):
    PART, MORE = "output_text", {"logprobs": []}

    def __init__(self) -> None:
        super().__init__(_new_id("msg"))

    def part(self) -> dict[str, Any]:
        return super().part() | {"annotations": [], "logprobs": []}

    def item(self, status: str, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "role": "assistant"} | super().item(status, content)


class _Reasoning(_Text):
    PART = "reasoning_text"

    def __init__(self) -> None:
        super().__init__(_new_id("rs"))

    def item(self, status: str, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"type": "reasoning", "summary": []} | super().item(status, content)


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
