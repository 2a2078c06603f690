"""Turns of a conversation as one text, as the model has learned it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text of all turns, of which the last waits for an answer.

    Turns are put together by the tokenizer's chat template. Without one, each goes on with the text, on a line of its
    own, and an answer on the line of what it answers.

    Args:
        tools: in OpenAI's shape; the chat template says them to the model.
        options: further variables of the chat template.

    Raises:
        ValueError: the template refuses it.
    """
    if tokenizer.chat_template:
        try:
            turns = [dict(turn) for turn in messages]
            offered: Any = None if tools is None else [dict(tool) for tool in tools]
            variables = {**(options or {}), "add_generation_prompt": True, "tokenize": False}
            return str(tokenizer.apply_chat_template(turns, offered, **variables))
        except (TemplateError, TypeError, ValueError) as error:  # of what a template does with what it does not expect
            raise ValueError(f"the model's chat template refuses this: {error}") from None
    return "".join(turn["content"] if turn["role"] == "assistant" else f"\n{turn['content']}" for turn in messages)[1:]


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Of what ``render`` returns: a template writes the special tokens of the beginning itself."""
    return list(tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids)
