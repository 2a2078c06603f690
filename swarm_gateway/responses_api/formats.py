"""Answers in the shapes of OpenAI's Responses API: whole, and as the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swarm_gateway.generation.generating import Delta
from swarm_gateway.generation.tools import ToolCall
from swarm_gateway.responses_api.requests import ResponsesRequest
from swarm_gateway.web.http import EVENT_STREAM, OPENAI, Dialect, as_json


def _event(content: Any) -> bytes:
    """Return an event. The body of an error is one too, in the shape of errors and in that of events."""
    if "error" in content and "type" not in content:
        content = {"type": "error"} | {**content["error"], "type": "error"} | content
    return f"event: {content['type']}\ndata: ".encode() + as_json(content) + b"\n\n"


RESPONSES = Dialect(EVENT_STREAM, _event, OPENAI.error)


class ResponseWriter:
    """The writer of one response. A response is a message, calls of functions, or both."""

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
        self._num_prompt = num_prompt
        self._num_events = 0
        self._done: list[dict[str, Any]] = []  # items that are complete
        self._message: dict[str, Any] | None = None  # the open message; its text is in ``_text``
        self._text = ""
        self._space = ""  # white space that is not sent before other text comes
        self.final: dict[str, Any] | None = None  # the response, once it is complete

    def events(self, delta: Delta, num_generated: int) -> Iterator[dict[str, Any]]:
        """Yield the events of one piece. The first piece also has the stream's beginning, and the last one its end."""
        if not self._num_events:
            for kind in ("response.created", "response.in_progress"):
                yield self._numbered(kind, response=self._response("in_progress"))
        is_last = delta.finish is not None
        is_empty = is_last and not (delta.calls or self._done or self._message)
        yield from self._add_text(delta.text, even_space=is_empty)
        for call in delta.calls:
            yield from self._close_message("completed")
            yield from self._call(call)
        if is_last:
            status = "incomplete" if delta.finish == "length" else "completed"
            yield from self._close_message(status)
            self.final = self._response(status, num_generated)
            yield self._numbered(f"response.{status}", response=self.final)

    def _response(self, status: str, num_generated: int | None = None) -> dict[str, Any]:
        usage = None
        if num_generated is not None:
            usage = {
                "input_tokens": self._num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._num_prompt + num_generated,
            }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        rest = {"status": status, "incomplete_details": details, "output": list(self._done), "usage": usage}
        return self._head | rest

    def _numbered(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _add_text(self, text: str, *, even_space: bool) -> Iterator[dict[str, Any]]:
        text = self._space + text
        if self._message is None and not text.strip() and not even_space:
            self._space = text
            return
        self._space = ""
        if self._message is None:
            self._message = _message(_new_id("msg"), "in_progress", [])
            yield self._numbered("response.output_item.added", output_index=len(self._done), item=self._message)
            yield self._numbered("response.content_part.added", **self._place(), part=_part(""))
        if text:
            self._text += text
            yield self._numbered("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _close_message(self, status: str) -> Iterator[dict[str, Any]]:
        self._space = ""
        if self._message is None:
            return
        part = _part(self._text)
        yield self._numbered("response.output_text.done", **self._place(), text=self._text, logprobs=[])
        yield self._numbered("response.content_part.done", **self._place(), part=part)
        yield self._ended(_message(self._message["id"], status, [part]))
        self._message, self._text = None, ""

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        item = {"type": "function_call", "id": _new_id("fc"), "call_id": call.id, "name": call.name}
        index, place = len(self._done), {"item_id": item["id"], "output_index": len(self._done)}
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._numbered("response.output_item.added", output_index=index, item=begun)
        yield self._numbered("response.function_call_arguments.delta", **place, delta=call.arguments)
        said = {"arguments": call.arguments, "name": call.name}
        yield self._numbered("response.function_call_arguments.done", **place, **said)
        yield self._ended(item | {"arguments": call.arguments, "status": "completed"})

    def _ended(self, item: dict[str, Any]) -> dict[str, Any]:
        self._done.append(item)
        return self._numbered("response.output_item.done", output_index=len(self._done) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        assert self._message is not None
        return {"item_id": self._message["id"], "output_index": len(self._done), "content_index": 0}


def _message(message_id: str, status: str, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": message_id, "status": status, "role": "assistant", "content": list(content)}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
