"""Background tasks: repetition of a server's periodic work, and the end of tasks."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from swarm_protocol.failures import logged_errors

T = TypeVar("T")
_logger = logging.getLogger(__name__)


async def repeat(action: Callable[[], Awaitable[T | None]], pause_s: tuple[float, float]) -> T:
    """Repeat the action after random pauses until it returns a result; an error must not end the server."""
    while True:
        await asyncio.sleep(random.uniform(*pause_s))
        result = None
        with logged_errors(_logger, "a server's routine failed; it is tried again"):
            result = await action()
        if result is not None:
            return result


async def end_tasks(tasks: Collection[asyncio.Future[Any]]) -> list[Any]:
    """Cancel the tasks, wait until all have ended, and return the result or the error of each."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
