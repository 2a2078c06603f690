"""What tests of ``generate`` in several threads share: one that is held up, while others begin."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from tests.swarm.pair import Pair, random_ids
from tests.swarm.waiting import DEADLINE_S

GREEDY = {"max_new_tokens": 8, "do_sample": False}


class Gate(BaseStreamer):
    """Holds up a generation until it is opened, at its prompt or after so many tokens. Keeps what it gets."""

    def __init__(self, num_tokens: int = 0) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        self.got: list[list[int]] = []
        self.num_ends = 0
        self._num_tokens = num_tokens

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())
        if len(self.got) > self._num_tokens:
            self.arrived.set()
            assert self.opened.wait(DEADLINE_S)

    def end(self) -> None:
        self.num_ends += 1


@contextmanager
def another_under_way(pair: Pair) -> Iterator[None]:
    gate = Gate()
    ids = random_ids(1, 5, seed=99)
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(pair.remote.generate, ids, streamer=gate, **GREEDY)
        assert gate.arrived.wait(DEADLINE_S)
        try:
            yield
        finally:
            gate.opened.set()
        assert torch.equal(generating.result(), pair.whole.generate(ids, **GREEDY))


def sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences
