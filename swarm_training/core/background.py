"""The event loop on which all network traffic of training runs, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine on the background loop and waits for its result; Ctrl-C cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _running_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:  # gRPC wants one loop for all that a process has
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="swarm training", daemon=True).start()
        return _loop
