"""A generation as an asynchronous iterator: one whose reader has gone is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig

from swarm_client.batching.request import Request, TokenListener
from swarm_client.batching.streaming import stream
from tests.unit.support import TIMEOUT_S

PICTURE = Request((1,), GenerationConfig(max_new_tokens=1), pictures={"pixel_values": torch.zeros(1)})


@dataclass
class SlowBatcher:
    """Submits once it is told to, as if a vision tower took its time."""

    began: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def submit(self, _request: Request, _listener: TokenListener) -> SlowBatcher:
        self.began.set()
        assert self.go_on.wait(TIMEOUT_S)
        return self

    def cancel(self) -> None:
        self.cancelled.set()


def test_a_reader_that_goes_while_a_picture_is_read_cancels_the_generation() -> None:
    batcher = SlowBatcher()

    async def run() -> None:
        reading = asyncio.ensure_future(anext(stream(batcher, PICTURE)))
        assert await asyncio.to_thread(batcher.began.wait, TIMEOUT_S)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        assert not batcher.cancelled.is_set()  # there is no generation yet
        batcher.go_on.set()
        assert await asyncio.to_thread(batcher.cancelled.wait, TIMEOUT_S)

    asyncio.run(run())
