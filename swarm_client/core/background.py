"""Coroutines on the network loop of this process, for code of other threads; and the loop's clock."""

from __future__ import annotations

import asyncio
import time

from swarm_protocol.process.network_loop import run, submit

__all__ = ["exact_s", "now_s", "run", "submit"]


def now_s() -> float:
    """The loop's clock; for code that runs on it."""
    return asyncio.get_running_loop().time()


def exact_s() -> float:
    """The same for measuring: uvloop's clock counts whole milliseconds."""
    loop = asyncio.get_running_loop()
    return time.perf_counter() if type(loop).__module__.startswith("uvloop") else loop.time()
