"""Runs coroutines on this process's network loop for other threads, and reads the loop's clock."""

from __future__ import annotations

import asyncio
import time

from swarm_protocol.process.network_loop import run, submit

__all__ = ["exact_s", "now_s", "run", "submit"]


def now_s() -> float:
    """Return the loop's clock, for code that runs on the loop."""
    return asyncio.get_running_loop().time()


def exact_s() -> float:
    """Return a clock for measuring: uvloop's own clock counts whole milliseconds."""
    loop = asyncio.get_running_loop()
    return time.perf_counter() if type(loop).__module__.startswith("uvloop") else loop.time()
