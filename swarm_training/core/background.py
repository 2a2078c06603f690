"""The event loop on which all network traffic of training runs, in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_STOP_TIMEOUT_S = 2.0
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
            thread = threading.Thread(target=_loop.run_forever, name="swarm training", daemon=True)
            thread.start()
            atexit.register(_stop, _loop, thread)
        return _loop


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Ends the loop before the interpreter does: a thread that is inside gRPC at that moment can crash it."""
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_STOP_TIMEOUT_S)
