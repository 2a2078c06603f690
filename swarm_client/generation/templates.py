"""The turns of a conversation as one text, in the format that the model has learned."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

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
        ValueError: the template refuses the conversation, or takes too long.
    """
    if tokenizer.chat_template:
        try:
            turns = [dict(turn) for turn in messages]
            offered: Any = None if tools is None else [dict(tool) for tool in tools]
            variables = {**(options or {}), "add_generation_prompt": True, "tokenize": False}
            with _limited(most_cpu_s):
                return str(tokenizer.apply_chat_template(turns, offered, **variables))
        except (TemplateError, TypeError, ValueError, RecursionError) as error:  # the template got unexpected input
            raise ValueError(f"the model's chat template refuses this: {error}") from None
    return "".join(turn["content"] if turn["role"] == "assistant" else f"\n{turn['content']}" for turn in messages)[1:]


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
