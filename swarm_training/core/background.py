"""Coroutines on the network loop of this process, for code of other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm_protocol.process.network_loop import network_loop

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine on the network loop and waits for its result; Ctrl-C cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, network_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
