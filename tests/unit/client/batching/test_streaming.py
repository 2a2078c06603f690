"""A generation as an asynchronous iterator: its items in order, few wake-ups, and an end when its reader has gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from swarm_client.batching.request import Request, Token, TokenListener
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


async def test_a_reader_that_goes_while_a_picture_is_read_cancels_the_generation() -> None:
    batcher = SlowBatcher()
    reading = asyncio.ensure_future(anext(stream(batcher, PICTURE)))
    assert await asyncio.to_thread(batcher.began.wait, TIMEOUT_S)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    assert not batcher.cancelled.is_set()  # there is no generation yet
    batcher.go_on.set()
    assert await asyncio.to_thread(batcher.cancelled.wait, TIMEOUT_S)


@dataclass
class CollectingBatcher:
    """A batcher that only remembers the listeners."""

    listeners: list[TokenListener] = field(default_factory=list)

    def submit(self, _request: Request, listener: TokenListener) -> CollectingBatcher:
        self.listeners.append(listener)
        return self

    def cancel(self) -> None:
        pass


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often other threads wake it."""

    num_wakes = 0

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        self.num_wakes += 1
        return super().call_soon_threadsafe(*arguments, **options)


REQUEST = Request((1,), GenerationConfig(max_new_tokens=2))


def test_the_tokens_of_one_pass_wake_the_readers_loop_once() -> None:
    batcher = CollectingBatcher()

    async def read() -> list[Any]:
        return [item async for item in stream(batcher, REQUEST)]

    async def run() -> None:
        reading = [asyncio.ensure_future(read()) for _ in range(4)]
        while len(batcher.listeners) < len(reading):
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        before = loop.num_wakes
        for number in range(3):
            for listener in batcher.listeners:
                listener(Token(number))
        assert loop.num_wakes == before + 1
        for listener in batcher.listeners:
            listener("length")
        assert await asyncio.gather(*reading) == [[Token(0), Token(1), Token(2), "length"]] * len(reading)
        batcher.listeners[0](Token(3))
        assert loop.num_wakes == before + 2

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(run())
    for listener in batcher.listeners:  # the generation loop then knows that nobody listens
        with pytest.raises(RuntimeError, match="closed"):
            listener(Token(4))
