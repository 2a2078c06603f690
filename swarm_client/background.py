"""The event loop on which all network traffic of this process runs, in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_lock = threading.RLock()  # reentrant: garbage collection inside may close a session, which comes back here
_loop: asyncio.AbstractEventLoop | None = None
_owner_pid = 0


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
    return asyncio.run_coroutine_threadsafe(coroutine, _running_loop())


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _owner_pid
    with _lock:
        if _loop is None or _owner_pid != os.getpid():  # a forked child starts its own
            _loop = _new_loop()
            _owner_pid = os.getpid()
            threading.Thread(target=_loop.run_forever, name="swarm network", daemon=True).start()
        return _loop


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
