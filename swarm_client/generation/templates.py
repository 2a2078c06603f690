"""The turns of a conversation as one text, in the format that the model has learned."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from swarm_protocol.failures import any_error_as

_CPU_S = 2.0  # the limit for rendering, which takes some milliseconds for a long conversation
_FILENAME = "<template>"  # the file name of the code that Jinja makes of templates


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    most_cpu_s: float = _CPU_S,
) -> str:
    """Return the text of all turns; the last turn waits for an answer.

    The tokenizer's chat template joins the turns. Without a template, each turn is on a new line, and an answer stays
    on the line of its question.

    Args:
        tools: the tools in OpenAI's shape, which the chat template describes to the model.
        options: further variables of the chat template.

    Raises:
        ValueError: the template refuses the conversation, fails, or takes too long.
    """
    if tokenizer.chat_template:
        turns = [dict(turn) for turn in messages]
        offered: Any = None if tools is None else [dict(tool) for tool in tools]
        variables = {**(options or {}), "add_generation_prompt": True, "tokenize": False}
        with any_error_as(_refusal), _limited(most_cpu_s):  # the code of strangers may raise any exception
            return str(tokenizer.apply_chat_template(turns, offered, **variables))
    return "".join(turn["content"] if turn["role"] == "assistant" else f"\n{turn['content']}" for turn in messages)[1:]


def _refusal(error: Exception) -> ValueError:
    return ValueError(f"the model's chat template refuses this: {error}")


@contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Raise ValueError inside a template that takes more than ``cpu_s`` of processor time on the current thread.

    Templates come from strangers, and may loop forever. The time is checked before each line of their code, by Python's
    means for debuggers.
    """
    end_s = time.thread_time() + cpu_s

    def before_line(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.thread_time() > end_s:
            raise ValueError(f"it takes more than {cpu_s:g} s of processor time")
        return before_line

    def before_call(frame: FrameType, _event: str, _argument: Any) -> Any:  # None: the call runs at full speed
        return before_line if frame.f_code.co_filename == _FILENAME else None

    others = sys.gettrace()  # such as a debugger's
    sys.settrace(before_call)
    try:
        yield
    finally:
        sys.settrace(others)


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text from ``render``. A template writes the first special tokens itself."""
    return list(tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids)
