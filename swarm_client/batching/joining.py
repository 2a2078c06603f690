"""The sharing of a loop by threads that call ``generate``: from the second generation on, all go through one loop.

The first generation moves to the loop too, if it may guess: between two passes it checks whether there are others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from swarm_client.batching.config import not_batched
from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import FinishReason, Item, Request, Token
from swarm_client.batching.row import BatchRow
from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.generating import Ends, GeneratedText
from swarm_client.speculation.speculation import Guessing
from swarm_protocol.failures import undone_on_error

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin

_SOON_S = 60.0  # for this long after generations ran together, others are expected
_STOP_S = 10.0  # the longest wait for the end of a step that was given up


class SharedLoop:
    """The shared loop of one model. It exists while several generations are active."""

    def __init__(self) -> None:
        self._loop: GenerationLoop | None = None
        self._num_running = 0
        self._shared_s = -inf  # the last time at which several generations ran
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Count a generation inside the context; yield whether there are others."""
        with self._lock:
            are_others = self._num_running > 0
            self._num_running += 1
            if are_others:
                self._shared_s = time.monotonic()
        try:
            yield are_others
        finally:
            with self._lock:
                self._num_running -= 1
                if self._num_running:
                    self._shared_s = time.monotonic()
                idle = None
                if not self._num_running:  # later generations begin another loop
                    idle, self._loop = self._loop, None
            if idle is not None:  # closed without the lock: the loop's thread is waited for
                idle.close()

    def is_alone(self) -> bool:
        """Return whether there is at most one generation."""
        return self._num_running <= 1

    @staticmethod
    def computes_for(model: Any, config: GenerationConfig) -> bool:
        """Return whether a loop's thread would compute the same as the calling thread."""
        is_plain = not model.training and model.prompts is None and not model.is_watched
        is_here = model.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        return is_plain and is_here and not_batched(config) is None

    def expects_others(self) -> bool:
        """Return whether a new generation will probably not be alone, because there were several recently."""
        return time.monotonic() - self._shared_s < _SOON_S

    def join(
        self, model: RemoteModelMixin, arguments: Mapping[str, Any], streamer: BaseStreamer | None
    ) -> torch.Tensor | None:
        """Return what ``generate`` returns for these arguments; None if the loop cannot do what they ask for.

        Raise SwarmError if the swarm fails.
        """
        request = _request(model, arguments)
        if request is None:
            return None
        answer = _Answer()
        try:
            generation = self._of(model).submit(request, answer)
        except ValueError:  # the stock method can compute it, or raises an error of its own
            return None
        prompt = torch.tensor([request.prompt])
        if streamer is not None:
            streamer.put(prompt)
        new = answer.tokens(generation, streamer)
        if streamer is not None:
            streamer.end()
        return torch.cat([prompt, torch.tensor([new], dtype=prompt.dtype)], 1)

    def take_over(
        self, model: Any, text: GeneratedText, ends: Ends, session: RemoteSession, guessing: Guessing
    ) -> torch.Tensor:
        """Finish a generation that has been alone so far; return the whole text, [1, length]. Raise SwarmError."""
        answer = _Answer()
        row = self._of(model).take_over(text, ends, session, guessing, answer)

        def remove_unread() -> None:
            row.stopped.wait(_STOP_S)  # the caller may use the session at once, and a step may still be under way
            ahead = session.length - (text.ids.shape[1] + len(answer.ids) - 1)  # positions that the caller has not read
            if ahead > 0:
                session.crop(ahead)

        with undone_on_error(remove_unread):
            new = answer.tokens(row, text.streamer)
        return torch.cat([text.ids, torch.tensor([new], dtype=text.ids.dtype)], 1)

    def close(self) -> None:
        """End all generations in the loop."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def _of(self, model: RemoteModelMixin) -> GenerationLoop:
        with self._lock:
            if self._loop is None:
                self._loop = GenerationLoop(model)
            return self._loop


def _request(model: Any, arguments: Mapping[str, Any]) -> Request | None:
    """Return the request of these arguments; None unless they just ask for tokens of one row on the CPU."""
    given = {name: value for name, value in arguments.items() if value is not None}
    ids, other_ids = given.pop("inputs", None), given.pop("input_ids", None)
    ids = other_ids if ids is None else ids
    mask = given.pop("attention_mask", None)
    if not _is_one_row(ids, mask):
        return None
    processors = given.pop("logits_processor", ())
    config, others = model._prepare_generation_config(given.pop("generation_config", None), **given)
    if others or not SharedLoop.computes_for(model, config):
        return None
    if config.max_new_tokens is None or _wants_more(config):
        return None
    # All generations of a process draw from the same random numbers, as in the stock method.
    generator = torch.default_generator if config.do_sample else None
    return Request(tuple(ids[0].tolist()), config, generator=generator, processors=tuple(processors))


def _is_one_row(ids: Any, mask: torch.Tensor | None) -> bool:
    """Return whether these are the token ids of one text without padding, on the CPU."""
    is_row = isinstance(ids, torch.Tensor) and ids.dim() == 2 and len(ids) == 1 and ids.device.type == "cpu"
    return is_row and ids.dtype == torch.int64 and (mask is None or bool(mask.all()))


def _wants_more(config: GenerationConfig) -> bool:
    """Return whether the config asks for something besides the choice of tokens."""
    is_plain_cache = config.use_cache is not False and config.cache_implementation is None
    return bool(config.return_dict_in_generate or config.token_healing or not is_plain_cache)


class _Answer:
    """A listener whose tokens are read on the thread that called ``generate``."""

    def __init__(self) -> None:
        self.ids: list[int] = []  # tokens that were read
        self._heard: queue.SimpleQueue[Token | FinishReason | BaseException] = queue.SimpleQueue()

    def __call__(self, item: Item | BaseException) -> None:
        if isinstance(item, Token | str | BaseException):  # the model's own callback gets events
            self._heard.put(item)

    def tokens(self, generation: BatchRow, streamer: BaseStreamer | None) -> list[int]:
        """Return all tokens once the generation has ended. An interruption cancels the generation."""
        with undone_on_error(generation.cancel):  # such as an error of the caller's streamer
            while isinstance(heard := self._heard.get(), Token):
                self.ids.append(heard.id)
                if streamer is not None:
                    streamer.put(torch.tensor([heard.id]))
        if isinstance(heard, BaseException):
            raise heard
        return self.ids
