"""Runs that never wait, and that are the same each time: their clock jumps, and what is drawn by chance is known."""

from __future__ import annotations

import asyncio
import random
import secrets
from asyncio import Future
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from time import monotonic
from typing import Any
from unittest.mock import patch

import torch

MOST_REAL_S = 500.0  # that one loop may take, before the alarm of pytest-timeout: tests take a minute at most


class VirtualLoop(asyncio.SelectorEventLoop):
    """Never waits: when nothing is ready, its clock jumps to the next timer.

    Rounds without a jump take no time, unless there are a thousand in a row. Code that waits for less than the clock
    can tell would otherwise wait for ever. What is handed to a thread is computed at once, since the clock would jump
    over the time that the thread takes.

    A loop that goes on for ever ends by itself: the alarm of pytest-timeout would be raised within one of its tasks,
    and the others would go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now, self._num_rounds = 0.0, 0
        select, ends_s = self._selector.select, monotonic() + MOST_REAL_S

        def jump(timeout: float | None):
            if timeout is None:
                raise RuntimeError("nothing will ever happen again: the test hangs")
            if monotonic() > ends_s:
                raise RuntimeError(f"the test runs on after {MOST_REAL_S:g} s, at {self._now:.1f} virtual seconds")
            self._num_rounds = 0 if timeout > 0 else self._num_rounds + 1
            self._now += timeout if self._num_rounds < 1000 else 1e-6
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Executor | None, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtually(coroutine: Coroutine[Any, Any, Any], limit_s: float | None = None) -> Any:
    """Its result, in virtual time, of which it may take so much."""

    async def limited() -> Any:
        async with asyncio.timeout(limit_s):
            return await coroutine

    with _same_chance(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())


async def at_once(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function here, where the product would hand it to a thread."""
    return function(*args)


@contextmanager
def _same_chance() -> Iterator[None]:
    """But for the order of sets of strings, which ``PYTHONHASHSEED`` decides."""
    chance, before = random.Random(0), random.getstate()
    random.seed(0)
    torch.manual_seed(0)
    try:
        with (
            patch.object(secrets, "token_bytes", chance.randbytes),
            patch.multiple(random.SystemRandom, random=chance.random, getrandbits=chance.getrandbits),
        ):
            yield
    finally:
        random.setstate(before)
