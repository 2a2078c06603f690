"""Answers in the shapes of Ollama's API. A stream is one JSON object in each line."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from swarm_gateway.answers.answer_reader import ToolCall
from swarm_gateway.generation.generating import Delta, QueuedGenerations, joined
from swarm_gateway.generation.parts import object_of
from swarm_gateway.web.http import Dialect, as_date, as_json


def _line(content: Any) -> bytes:
    return as_json(content) + b"\n"


_BLANK = b" "  # before a line: readers of JSON skip it, while Ollama's client fails at an empty line
OLLAMA = Dialect("application/x-ndjson", _line, lambda error: {"error": str(error)}, _BLANK)


class AnswerFormat:
    """The format of one answer to ``/api/chat`` or, without ``is_chat``, to ``/api/generate``."""

    def __init__(self, model: str, began_s: float, *, is_chat: bool) -> None:
        """Begin an answer to a request that came at ``began_s``, by ``time.perf_counter``."""
        self._model, self._began_s, self._is_chat = model, began_s, is_chat
        self._first_s: float | None = None  # when the first piece came

    def whole(self, deltas: Sequence[Delta], work: QueuedGenerations) -> dict[str, Any]:
        whole = joined(deltas)
        return self._said(whole.text, whole.calls, whole.reasoning) | self._end(whole, work)

    def chunk(self, delta: Delta, work: QueuedGenerations) -> dict[str, Any]:
        rest = {"done": False} if delta.finish is None else self._end(delta, work)
        return self._said(delta.text, delta.calls, delta.reasoning) | rest

    def begin(self) -> None:
        """Note that a piece has come: the time of the first one counts."""
        if self._first_s is None:
            self._first_s = time.perf_counter()

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request that only loads the model."""
        return self._said("", ()) | {"done": True, "done_reason": "load"}

    def _said(self, text: str, calls: Sequence[ToolCall], reasoning: str = "") -> dict[str, Any]:
        head = {"model": self._model, "created_at": as_date(time.time())}
        thinking = {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            return head | {"response": text} | thinking
        message: dict[str, Any] = {"role": "assistant", "content": text} | thinking
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return head | {"message": message}

    def _end(self, delta: Delta, work: QueuedGenerations) -> dict[str, Any]:
        """Return the end of an answer. Durations are in nanoseconds; the prompt's includes the wait for a turn."""
        now_s = time.perf_counter()
        first_s = now_s if self._first_s is None else self._first_s
        return {
            "done": True,
            "done_reason": "length" if delta.finish == "length" else "stop",
            "total_duration": _nanoseconds(now_s - self._began_s),
            "load_duration": 0,
            "prompt_eval_count": work.num_prompt,
            "prompt_eval_duration": _nanoseconds(first_s - self._began_s),
            "eval_count": work.num_generated,
            "eval_duration": _nanoseconds(now_s - first_s),
        }


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = object_of(call.arguments)
    given = arguments if isinstance(arguments, dict) else {}
    return {"id": call.id, "function": {"name": call.name, "arguments": given}}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def tag(name: str, created: int) -> dict[str, Any]:
    """Return the entry of a model in a list. Its size and the like are not known, as servers of the swarm have it."""
    nothing = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": ""}
    return {
        "name": name,
        "model": name,
        "modified_at": as_date(created),
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": nothing | {"quantization_level": ""},
    }
