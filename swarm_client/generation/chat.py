"""A conversation with a model: one session on the servers goes on from turn to turn."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from swarm_client.generation.templates import first_tokens, render
from swarm_client.generation.text_options import TextOptions
from swarm_protocol.errors import SwarmError

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin

EXIT, RESET = "/exit", "/reset"


class Conversation:
    """The turns so far, and the session that holds their keys and values; a turn sends only what is new.

    Turns are put together by the tokenizer's chat template. Without one, each line goes on with the text, on a line of
    its own.

    Attributes:
        token_ids: of all turns.
        cache: what the model has computed of them.
    """

    def __init__(self, model: RemoteModelMixin, tokenizer: PreTrainedTokenizerBase, options: TextOptions) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._messages: list[dict[str, str]] = []
        self._text = ""  # of these
        self._sent: list[int] = []  # to the model; the cache holds the first of them
        self.token_ids: list[int] = []
        self.cache = model.new_cache()
        if options.seed is not None:
            torch.manual_seed(options.seed)

    def answer(self, line: str) -> str:
        """Prints what the model answers as it is written, and returns it.

        If it is interrupted or fails, the answer ends there; if there is nothing of it, the turn is taken back.

        Raises:
            ValueError: the model has no room for the line, or its template refuses it.
            SwarmError: see ``swarm_protocol.errors``.
        """
        messages = [*self._messages, {"role": "user", "content": line}]
        text = render(self._tokenizer, messages)
        prompt = self._tokens(text)
        arguments = self._arguments(len(prompt))
        known = self.cache.get_seq_length()
        if known >= len(prompt) or prompt[:known] != self._sent[:known]:
            self.cache.session.reset()  # a turn was taken back, or the template has changed earlier ones
        ids = torch.tensor([prompt], device=self._model.device)
        answer = _Answer(self._tokenizer)
        try:
            self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=answer, **arguments)
        except BaseException:
            answer.end()  # type: ignore[no-untyped-call]  # whatever is said next begins on a line of its own
            raise
        finally:
            self._sent = prompt + answer.token_ids
            content = str(self._tokenizer.decode(answer.token_ids, skip_special_tokens=True))
            if answer.token_ids:
                self.token_ids, self._text = self._sent, text + content
                self._messages = [*messages, {"role": "assistant", "content": content}]
        return content

    def reset(self) -> None:
        """Forgets all turns."""
        self._messages, self._text, self._sent, self.token_ids = [], "", [], []
        self.cache.session.reset()

    def _tokens(self, text: str) -> list[int]:
        """Of all turns: those that the model has chosen stay, though a tokenizer might cut its answers otherwise."""
        if not self._text or not text.startswith(self._text):  # templates may shorten earlier turns
            return first_tokens(self._tokenizer, text)
        known = self.token_ids
        if known[-1] in self._tokenizer.all_special_ids:  # the end of the answer: the template says how a turn ends
            known = known[:-1]
        return known + list(self._tokenizer(text.removeprefix(self._text), add_special_tokens=False).input_ids)

    def _arguments(self, num_tokens: int) -> dict[str, Any]:
        """For ``generate``: an answer takes what positions are left at most."""
        if num_tokens == 0:
            raise ValueError("the line has no tokens: expected some text")
        arguments = {self._model._family.cache_argument: self.cache, **self._options.as_arguments()}
        limit = self._model.blocks.max_positions
        if limit is None:
            return arguments
        left = limit - num_tokens - (0 if self._model.prompts is None else self._model.prompts.num_tokens)
        if left < 1:
            raise ValueError(
                f"with this, the conversation has {num_tokens} tokens, and the model only {limit} positions: "
                f"{RESET} starts over"
            )
        return arguments | {"max_new_tokens": min(self._options.max_new_tokens, left)}


class _Answer(TextStreamer):
    """Prints an answer as it comes, and keeps its tokens: those of one that is interrupted are known from here only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.token_ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.token_ids += value.tolist()
        super().put(value)  # type: ignore[no-untyped-call]


def chat(conversation: Conversation, *, interactive: bool) -> None:
    """Answers the lines of the input until it ends.

    Args:
        interactive: somebody types them. What goes wrong is said, and the conversation goes on; Ctrl-C stops an answer.
            Otherwise both end it.
    """
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited, and come again)
        print(f"{EXIT} or Ctrl-D ends the conversation, {RESET} starts over, Ctrl-C stops an answer.")
    going_on = True
    while going_on:
        try:
            going_on = _turn(conversation, input("> " if interactive else "").strip())
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
        except (SwarmError, ValueError) as error:
            if not interactive:
                raise
            print(f"error: {error}", file=sys.stderr)


def _turn(conversation: Conversation, line: str) -> bool:
    """Whether the conversation goes on after this line."""
    if line == RESET:
        conversation.reset()
    elif re.fullmatch(r"/\w+", line) and line != EXIT:
        raise ValueError(f"there is no command {line}: expected {EXIT} or {RESET}")
    elif line and line != EXIT:
        conversation.answer(line)
    return line != EXIT
