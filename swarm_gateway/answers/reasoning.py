"""Reasoning: the part of an answer in which a model thinks, and the formats of model families."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from swarm_gateway.grammars.compiler import GrammarCompiler

_TAIL = 16  # tokens at the end of a prompt, which may begin the reasoning or say that there is none
_SPACE = "/[ \\n]{0,4}/"  # without a limit, a model might write only whitespace


@dataclass(frozen=True)
class ReasoningFormat:
    """The format in which a family of models writes its reasoning.

    Attributes:
        marker: a text that only the chat templates of this family contain.
        begin, end: the texts around the reasoning.
        regions: the parts of an answer, as fields of a ``response_template`` of ``transformers``: ``reasoning``, and
            ``answer`` if the answer is marked too.
        before_answer: the texts between the reasoning's end and an answer.
    """

    marker: str
    begin: Sequence[str]
    end: Sequence[str]
    regions: Mapping[str, Mapping[str, Any]]
    before_answer: Sequence[str] = ()

    def rule(self, name: str, compiler: GrammarCompiler, *, has_begun: bool) -> str:
        """Return the rule ``name`` in Lark's syntax: reasoning that comes to its end, and perhaps white space."""
        from swarm_gateway.grammars.compiler import text_until  # it needs a package that only the gateway has

        first, *rest = self.end
        begin = "" if has_begun else " ".join(map(compiler.literal, self.begin))
        after = " ".join(map(compiler.literal, rest)) or _SPACE
        body = text_until(f"{name}_body", compiler.literal(first))
        return f"{body}\n{name}: {begin} {name}_body {after}"


def _tags(begin: str, end: str) -> ReasoningFormat:
    """Return a format in which an answer begins with its reasoning between two tags."""
    region = {"open_pattern": rf"\A\s*{re.escape(begin)}", "close": end}
    return ReasoningFormat(end, [begin], [end], {"reasoning": region})


FORMATS = (
    ReasoningFormat(  # gpt-oss
        marker="<|channel|>analysis<|message|>",
        begin=["<|channel|>", "analysis", "<|message|>"],
        end=["<|end|>", "<|start|>", "assistant"],
        regions={
            "reasoning": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close": "<|end|>",
            },
            "answer": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)"
                r"(?: ?<\|constrain\|>)?(?: ?\w+)?<\|message\|>",
                "close": "<|end|>",
            },
        },
        before_answer=["<|channel|>", "final", "<|message|>"],
    ),
    _tags("[THINK]", "[/THINK]"),  # Mistral
    _tags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    _tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    _tags("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Kimi, MiniMax, SmolLM3 and others
)


@dataclass(frozen=True)
class ExpectedReasoning:
    """The reasoning that one answer may have, as it is known before the answer begins.

    Attributes:
        has_begun: the prompt ends with the beginning of the reasoning.
    """

    format: ReasoningFormat
    has_begun: bool

    @property
    def prefix(self) -> str:
        """Return the text that the prompt has of the reasoning."""
        return "".join(self.format.begin) if self.has_begun else ""


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """Return the reasoning's format of a chat template; None if it knows none."""
    return next((known for known in FORMATS if known.marker in template), None)


def reasoning_of(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> ExpectedReasoning | None:
    """Return the reasoning of the answer to ``prompt``, which are token ids; None if the answer has none.

    An answer may have reasoning if the chat template knows its end, unless the prompt ends with that end.
    """
    known = reasoning_format_of(str(tokenizer.chat_template or ""))
    if known is None:
        return None
    tail = str(tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)).rstrip()
    if tail.endswith(known.end[0]):
        return None
    return ExpectedReasoning(known, has_begun=tail.endswith("".join(known.begin)))
