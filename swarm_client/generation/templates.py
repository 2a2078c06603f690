"""Turns of a conversation as one text, as the model has learned it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_CPU_S = 2.0  # that rendering may take: a long conversation takes some milliseconds
_FILENAME = "<template>"  # of the code that Jinja makes of templates


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    most_cpu_s: float = _CPU_S,
) -> str:
    """The text of all turns, of which the last waits for an answer.

    Turns are put together by the tokenizer's chat template. Without one, each goes on with the text, on a line of its
    own, and an answer on the line of what it answers.

    Args:
        tools: in OpenAI's shape; the chat template says them to the model.
        options: further variables of the chat template.
        most_cpu_s: processor time that the template may take.

    Raises:
        ValueError: the template refuses it, or takes too long.
    """
    if tokenizer.chat_template:
        try:
            turns = [dict(turn) for turn in messages]
            offered: Any = None if tools is None else [dict(tool) for tool in tools]
            variables = {**(options or {}), "add_generation_prompt": True, "tokenize": False}
            with _limited(most_cpu_s):
                return str(tokenizer.apply_chat_template(turns, offered, **variables))
        except (TemplateError, TypeError, ValueError, RecursionError) as error:  # of what it does not expect
            raise ValueError(f"the model's chat template refuses this: {error}") from None
    return "".join(turn["content"] if turn["role"] == "assistant" else f"\n{turn['content']}" for turn in messages)[1:]


@contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Raise ValueError from within a template that takes more processor time than this on the current thread.

    Templates come from strangers, and may loop for ever. The time is read before each line of their code.
    """
    end_s = time.thread_time() + cpu_s

    def before_line(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.thread_time() > end_s:
            raise ValueError(f"it takes more than {cpu_s:g} s of processor time")
        return before_line

    def before_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return before_line if frame.f_code.co_filename == _FILENAME else None

    others = sys.gettrace()  # a debugger's for instance
    sys.settrace(before_call)
    try:
        yield
    finally:
        sys.settrace(others)


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Of what ``render`` returns: a template writes the special tokens of the beginning itself."""
    return list(tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids)
