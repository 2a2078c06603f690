"""An answer that is printed as it is generated: its reasoning, if it has any, apart from its text."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from swarm_client.generation.text_stream import TextStream
from swarm_gateway.answers.answer_reader import AnswerPiece, AnswerReader
from swarm_gateway.answers.reasoning import ExpectedReasoning, reasoning_of

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def printed_answer(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ends: Collection[int]) -> PrintedAnswer:
    """Return the streamer for the answer to ``prompt``. Both are token ids; ``ends`` are those that end an answer."""
    reasoning = reasoning_of(tokenizer, prompt)
    return PrintedAnswer(tokenizer) if reasoning is None else ReasonedAnswer(tokenizer, prompt, ends, reasoning)


class PrintedAnswer(TextStreamer):
    """A streamer that prints an answer, and keeps its tokens, which an interrupted ``generate`` does not return."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """Return the answer so far, without its reasoning."""
        return str(self.tokenizer.decode(self.token_ids, skip_special_tokens=True))

    @property
    def has_more(self) -> bool:
        """Return whether the tokens say more than the text: the answer has reasoning, perhaps an empty one."""
        return False

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.token_ids += value.tolist()
        super().put(value)  # type: ignore[no-untyped-call]


class ReasonedAnswer(PrintedAnswer):
    """A streamer for a model that reasons before it answers. A terminal shows the reasoning dimmed, above the answer.

    Where the output is no terminal, the reasoning goes to stderr, so that a program reads the answer alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        ends: Collection[int],
        reasoning: ExpectedReasoning,
    ) -> None:
        super().__init__(tokenizer)
        self._ends = ends
        self._decoded = TextStream(tokenizer, prompt, with_special=True)  # special tokens may mark the reasoning
        self._reader = AnswerReader(reasoning.format.regions, prefix=reasoning.prefix)
        self._whole = self._text = ""
        self._shows_reasoning = self._has_ended = False

    @property
    def text(self) -> str:
        return self._text

    @property
    def has_more(self) -> bool:
        return self._whole != self._text

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        for token in value.tolist():
            self.token_ids.append(token)
            if token not in self._ends:
                self._read(self._decoded.put(token))

    def end(self) -> None:
        """Print what was held, once: an interruption may come after the answer's own end."""
        if not self._has_ended:
            self._has_ended, self.next_tokens_are_prompt = True, True
            self._read(self._decoded.end())
            self._print(self._reader.end())
            print(flush=True)

    def _read(self, text: str) -> None:
        self._whole += text
        self._print(self._reader.put(text))

    def _print(self, piece: AnswerPiece) -> None:
        is_terminal = sys.stdout.isatty()
        apart = sys.stdout if is_terminal else sys.stderr
        if piece.reasoning:
            shown = f"{DIM}{piece.reasoning}{PLAIN}" if is_terminal else piece.reasoning
            print(shown, end="", flush=True, file=apart)
            self._shows_reasoning = True
        if piece.text:
            if self._shows_reasoning:
                print("\n", flush=True, file=apart)  # an empty line
                self._shows_reasoning = False
            self._text += piece.text
            print(piece.text, end="", flush=True)
