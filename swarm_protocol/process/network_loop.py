"""The event loop for all network traffic of this process, in its own thread, and functions to run coroutines on it.

Swarm clients and training peers share it, because grpc.aio needs one loop for everything in a process.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from swarm_protocol.process.routine import end_tasks
from swarm_protocol.system import raise_open_files

T = TypeVar("T")
_lock = threading.RLock()  # reentrant: garbage collection inside it may close a session, which calls back here
_loop: asyncio.AbstractEventLoop | None = None
_owner_pid = 0
_STOP_TIMEOUT_S = 2.0


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on the network loop and wait for its result in the calling thread; Ctrl-C cancels it."""
    future = submit(coroutine)
    try:
        return future.result()
    finally:
        future.cancel()  # after Ctrl-C; a future that is done stays as it is


def call(function: Callable[..., T], *arguments: object) -> T:
    """Call a plain function on the network loop, whose objects belong to it, and wait for the result."""

    async def called() -> T:
        return function(*arguments)

    return run(called())


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start the coroutine on the network loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _running_loop())


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _owner_pid
    with _lock:
        if _loop is None or _owner_pid != os.getpid():  # a forked child starts its own loop
            _loop = new_event_loop()
            _owner_pid = os.getpid()
            thread = threading.Thread(target=_loop.run_forever, name="swarm network", daemon=True)
            thread.start()
            atexit.register(_stop, _loop, thread, _owner_pid)
        return _loop


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, owner_pid: int) -> None:
    """End the loop before the interpreter ends: a thread that is inside gRPC at that moment can crash it."""
    if os.getpid() != owner_pid:  # a forked child has the handler, but not the thread
        return
    with contextlib.suppress(concurrent.futures.TimeoutError):
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), loop).result(_STOP_TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_STOP_TIMEOUT_S)


async def _cancel_tasks() -> None:
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop, or of asyncio where there is no uvloop; it may have many connections."""
    raise_open_files()
    try:
        import uvloop
    except ImportError:  # absent on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
