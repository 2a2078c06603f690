"""Prints the continuation of a text as a model generates it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from swarm_client.generation.templates import first_tokens, render
from swarm_client.generation.text_options import TextOptions
from swarm_client.model.cache import RemoteCache
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_models.checkpoints.gguf.tokenizer import read_tokenizer
from swarm_protocol.errors import CheckpointError
from swarm_protocol.failures import any_error_as, first_line, undone_on_error

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin


@dataclass(frozen=True)
class Continuation:
    """A continuation: the token ids after the prompt, and the seconds from the first to the last of these tokens."""

    token_ids: list[int]
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 else 0.0


def load_tokenizer(name_or_path: str = DEFAULT_MODEL, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer. Raise CheckpointError if there is none, or if it needs its own code."""
    location = locate(name_or_path)

    def refusal(error: Exception) -> CheckpointError:
        return CheckpointError(f"no tokenizer can be read from {name_or_path}: {first_line(error)}")

    with any_error_as(refusal):
        return read_tokenizer(location, revision)


def stream_text(
    model: RemoteModelMixin,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    options: TextOptions,
    *,
    cache: RemoteCache | None = None,
    on_token: Callable[[int], None] | None = None,
    is_question: bool = False,
) -> Continuation:
    """Print the prompt and its continuation. Raise ValueError if the prompt has no tokens.

    Args:
        is_question: whether to put the prompt into the model's chat template, and print the answer on the next line.
        on_token: called after each new token with the number of tokens so far; its output appears between two words.
    """
    if is_question:
        ids = first_tokens(tokenizer, render(tokenizer, [{"role": "user", "content": prompt}]))
        prompt += "\n"
    else:
        ids = tokenizer(prompt).input_ids
    prompt_length = len(ids)
    if prompt_length == 0:
        raise ValueError("the prompt is empty: expected some text to continue")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    beams = options.num_beams > 1  # the text of beams is known only at the end
    streamer = None if beams else _TimedStreamer(tokenizer, on_token)
    if streamer is not None:
        print(prompt, end="", flush=True)
    inputs = torch.tensor([ids], device=model.device)
    with undone_on_error(lambda: print(flush=True)):  # later messages begin on a new line
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=streamer,
            **({} if cache is None else {model._family.cache_argument: cache}),
            **options.as_arguments(),
        )
    token_ids = output[0, prompt_length:].tolist()
    if streamer is None:
        print(f"{prompt}{tokenizer.decode(token_ids, skip_special_tokens=True)}")
        return Continuation(token_ids, 0.0)
    return Continuation(token_ids, streamer.decode_s)


class _TimedStreamer(TextStreamer):
    """A streamer that prints text as it comes, and remembers the times of the first and the last new token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_token: Callable[[int], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_token = on_token
        self._times: list[float] = []

    @property
    def decode_s(self) -> float:
        return self._times[-1] - self._times[0] if self._times else 0.0

    def put(self, value: torch.Tensor) -> None:
        is_prompt = self.next_tokens_are_prompt  # read before ``super().put``, which clears it
        if not is_prompt:
            self._times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]
        if not is_prompt and self._on_token is not None:
            self._on_token(len(self._times))
