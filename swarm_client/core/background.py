"""Coroutines on the network loop of this process, for code of other threads; and the loop's clock."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm_protocol.process.network_loop import network_loop

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine on the background loop and waits for its result; Ctrl-C cancels it."""
    future = submit(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Starts the coroutine on the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, network_loop())


def now_s() -> float:
    """The loop's clock; for code that runs on it."""
    return asyncio.get_running_loop().time()


def exact_s() -> float:
    """The same for measuring: uvloop's clock counts whole milliseconds."""
    loop = asyncio.get_running_loop()
    return time.perf_counter() if type(loop).__module__.startswith("uvloop") else loop.time()
