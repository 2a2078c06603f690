"""``generate`` in several threads: from the second on, generations of a model go through one loop.

The first one goes on in it, if it is one that may guess: between two passes it looks whether there are others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from swarm_client.batching.config import not_batched
from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import FinishReason, Generation, Request, Servers, Token
from swarm_client.core.events import Event
from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.generating import Ends, Text
from swarm_client.speculation.speculation import Guessing

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin

_SOON_S = 60.0  # after there were several, there may be several again
_STOP_S = 10.0  # that a step which is given up takes to end, at most
_NOT_IN_A_CONFIG = {"inputs", "input_ids", "attention_mask", "generation_config", "logits_processor"}


class SharedLoop:
    """The loop of one model. It is there while several generations are under way."""

    def __init__(self) -> None:
        self._loop: GenerationLoop | None = None
        self._num_running = 0
        self._shared_s = -inf  # when there were several
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Around each generation; whether there are others."""
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
                if not self._num_running:  # who comes from now on begins another
                    idle, self._loop = self._loop, None
            if idle is not None:
                idle.close()

    def is_alone(self) -> bool:
        """Whether there is one generation at most."""
        return self._num_running <= 1

    @staticmethod
    def computes_for(model: Any, config: GenerationConfig) -> bool:
        """Whether a loop's thread computes what the calling thread would."""
        is_plain = not model.training and model.prompts is None and not model.is_watched
        is_here = model.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        return is_plain and is_here and not_batched(config) is None

    def expects_others(self) -> bool:
        """Whether a generation that begins will probably not be alone: there were several just now."""
        return time.monotonic() - self._shared_s < _SOON_S

    def join(
        self, model: RemoteModelMixin, arguments: Mapping[str, Any], streamer: BaseStreamer | None
    ) -> torch.Tensor | None:
        """What ``generate`` returns for these arguments; None if the loop cannot do what they ask for.

        Raises SwarmError.
        """
        request = _request(model, arguments)
        if request is None:
            return None
        answer = _Answer()
        try:
            generation = self._of(model).submit(request, answer)
        except ValueError:  # the stock method can, or has words of its own
            return None
        prompt = torch.tensor([request.prompt])
        if streamer is not None:
            streamer.put(prompt)
        new = answer.tokens(generation, streamer)
        if streamer is not None:
            streamer.end()
        return torch.cat([prompt, torch.tensor([new], dtype=prompt.dtype)], 1)

    def take_over(self, model: Any, text: Text, ends: Ends, session: RemoteSession, guessing: Guessing) -> torch.Tensor:
        """The whole text, [1, length], of a generation that has been alone so far. Raises SwarmError."""
        answer = _Answer()
        row = self._of(model).take_over(text, ends, session, guessing, answer)
        try:
            new = answer.tokens(row, text.streamer)
        except BaseException:
            row.stopped.wait(_STOP_S)  # the caller may use the session at once
            ahead = session.length - (text.ids.shape[1] + len(answer.ids) - 1)  # of what the caller has read
            if ahead > 0:
                session.crop(ahead)
            raise
        return torch.cat([text.ids, torch.tensor([new], dtype=text.ids.dtype)], 1)

    def close(self) -> None:
        """All that go through the loop end."""
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
    """None if they are about more than one row on a CPU and how its tokens are chosen."""
    given = {name: value for name, value in arguments.items() if value is not None}
    ids, other_ids = given.pop("inputs", None), given.pop("input_ids", None)
    ids = other_ids if ids is None else ids
    mask = given.pop("attention_mask", None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1 or ids.device.type != "cpu":
        return None
    if ids.dtype != torch.int64 or (mask is not None and not bool(mask.all())):
        return None
    processors = given.pop("logits_processor", ())
    config, others = model._prepare_generation_config(given.pop("generation_config", None), **given)
    if others or not SharedLoop.computes_for(model, config):
        return None
    if config.max_new_tokens is None or config.return_dict_in_generate or config.use_cache is False:
        return None
    if config.cache_implementation is not None or config.token_healing:
        return None
    # As in the stock method, all generations of a process draw from the same random numbers.
    generator = torch.default_generator if config.do_sample else None
    return Request(tuple(ids[0].tolist()), config, generator=generator, processors=tuple(processors))


class _Answer:
    """A listener whose tokens are read on the thread that has asked."""

    def __init__(self) -> None:
        self.ids: list[int] = []  # that were read
        self._heard: queue.SimpleQueue[Token | FinishReason | BaseException] = queue.SimpleQueue()

    def token(self, token: Token) -> None:
        self._heard.put(token)

    def scored(self, prompt: Sequence[Token]) -> None:
        """Do nothing: this is not asked for."""

    def happened(self, what: Servers | Event) -> None:
        pass  # which the model's own callback is told

    def ended(self, reason: FinishReason | BaseException) -> None:
        self._heard.put(reason)

    def tokens(self, generation: Generation, streamer: BaseStreamer | None) -> list[int]:
        """Once all are there. Whatever interrupts it cancels the generation."""
        try:
            while isinstance(heard := self._heard.get(), Token):
                self.ids.append(heard.id)
                if streamer is not None:
                    streamer.put(torch.tensor([heard.id]))
        except BaseException:
            generation.cancel()
            raise
        if isinstance(heard, BaseException):
            raise heard
        return self.ids
