"""Answers in the shapes of Anthropic's Messages API: whole, and as the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from swarm_gateway.answers.answer_reader import ToolCall
from swarm_gateway.generation.generating import Delta, joined
from swarm_gateway.generation.parts import object_of
from swarm_gateway.limits.admission import ApiError
from swarm_gateway.web.http import EVENT_STREAM, Dialect, as_json

_ERRORS = {  # by HTTP status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _event(content: Any) -> bytes:
    return f"event: {content['type']}\ndata: ".encode() + as_json(content) + b"\n\n"


ANTHROPIC = Dialect(EVENT_STREAM, _event, _error, _event({"type": "ping"}))


class MessageFormat:
    """The format of one answer. Text that is white space alone has no block of its own beside other blocks."""

    def __init__(self, model: str, num_prompt: int) -> None:
        """Begin an answer to a prompt of ``num_prompt`` tokens."""
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._num_prompt = num_prompt
        self._has_begun = False
        self._num_blocks = 0  # that have begun
        self._open = ""  # the open block: "text", "thinking", or none
        self._space = ""  # white space that is not sent before other text comes

    def whole(self, deltas: Sequence[Delta], num_generated: int) -> dict[str, Any]:
        """Return the answer that these pieces make."""
        whole = joined(deltas)
        text, reasoning = whole.text, whole.reasoning
        calls = [_tool_use(call, object_of(call.arguments)) for call in whole.calls]
        content: list[dict[str, Any]] = [_block("thinking") | {"thinking": reasoning}] if reasoning else []
        if text.strip() or not (content or calls):
            content.append(_block("text") | {"text": text})
        return self._message([*content, *calls], _end(whole), num_generated)

    def events(self, delta: Delta, num_generated: int) -> Iterator[dict[str, Any]]:
        """Yield the events of one piece. The first piece also has the stream's beginning, and the last one its end."""
        if not self._has_begun:
            self._has_begun = True
            nothing = {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": self._message([], nothing, 0)}
        if delta.reasoning:
            yield from self._open_block("thinking")
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        is_empty = delta.finish is not None and not delta.calls and self._num_blocks == 0
        yield from self._text(delta.text, even_space=is_empty)  # an answer has at least one block
        for call in delta.calls:
            yield from self._close_block()
            yield from self._call(call)
        if delta.finish is not None:
            yield from self._close_block()
            usage = {"output_tokens": num_generated}
            yield {"type": "message_delta", "delta": _end(delta), "usage": usage}
            yield {"type": "message_stop"}

    def _message(self, content: Sequence[Any], end: dict[str, Any], num_generated: int) -> dict[str, Any]:
        usage = {"input_tokens": self._num_prompt, "output_tokens": num_generated}
        return self._head | {"content": content} | end | {"usage": usage}

    def _text(self, text: str, *, even_space: bool) -> Iterator[dict[str, Any]]:
        text = self._space + text
        if self._open != "text" and not text.strip() and not even_space:
            self._space = text
            return
        yield from self._open_block("text")
        if text:
            yield self._delta({"type": "text_delta", "text": text})

    def _open_block(self, kind: str) -> Iterator[dict[str, Any]]:
        """Open a block of this kind, unless it is the open one."""
        if self._open != kind:
            yield from self._close_block()
            yield self._start(_block(kind))
        self._open, self._space = kind, ""

    def _close_block(self) -> Iterator[dict[str, Any]]:
        if self._open:
            yield self._stop()
        self._open = self._space = ""

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        yield self._start(_tool_use(call, {}))
        arguments = call.arguments if isinstance(object_of(call.arguments), dict) else "{}"
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        yield self._stop()

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._num_blocks += 1
        return {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": self._num_blocks - 1}


def _block(kind: str) -> dict[str, Any]:
    """Return an empty block. Reasoning has no signature, because nobody checks one."""
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _tool_use(call: ToolCall, arguments: Any) -> dict[str, Any]:
    given = arguments if isinstance(arguments, dict) else {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _end(delta: Delta) -> dict[str, Any]:
    if delta.stop and delta.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop}
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(delta.finish or "")
    return {"stop_reason": reason, "stop_sequence": None}
