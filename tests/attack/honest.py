"""An honest client beside an attack: are its tokens right, and how long does it wait for them?"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from tests.swarm.pair import random_ids

PROMPT = random_ids(1, 9, seed=7)
OPTIONS = dict(attention_mask=torch.ones_like(PROMPT), max_new_tokens=6, do_sample=False)


@dataclass(frozen=True)
class Generation:
    """How one generation went.

    Attributes:
        problem: what was wrong with it; empty if its tokens were right.
        longest_wait_s: for its first token, or from one to the next.
    """

    problem: str
    longest_wait_s: float


class HonestClient:
    """Generates the same tokens again and again."""

    def __init__(self, remote: PreTrainedModel, expected: torch.Tensor, logits: torch.Tensor) -> None:
        """``expected``: the tokens, [1, tokens]; ``logits``: of the prompt, [1, tokens, vocabulary]."""
        self.expected, self.logits = expected, logits
        self._remote = remote

    def generate(self) -> Generation:
        waits = _Waits()
        problem = ""
        try:
            if not torch.equal(self._remote.generate(PROMPT, streamer=waits, **OPTIONS), self.expected):
                problem = "its tokens are wrong"
            with torch.no_grad():
                logits = self._remote(PROMPT, use_cache=False).logits  # a pass without a session
            waits.put(PROMPT)
            if not torch.allclose(logits, self.logits, atol=1e-4):
                problem = "its logits are wrong"
        except Exception as error:  # the client's failure is what attacks are after
            problem = f"{type(error).__name__}: {error}"
            waits.put(PROMPT)
        return Generation(problem, waits.longest_s)

    @contextmanager
    def generating(self) -> Iterator[list[Generation]]:
        """Generates meanwhile, once at least; the list is complete afterwards."""
        over = threading.Event()
        generations: list[Generation] = []

        def generate() -> None:
            while not (generations and over.is_set()):
                generations.append(self.generate())

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            yield generations
        finally:
            over.set()
            thread.join()


class _Waits(BaseStreamer):
    """From token to token; the first time it is given the prompt, before anything is computed."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()
        self.longest_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        now_s = time.perf_counter()
        self.longest_s, self._last_s = max(self.longest_s, now_s - self._last_s), now_s

    def end(self) -> None:
        pass
