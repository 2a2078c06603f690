"""What a server does again and again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
_logger = logging.getLogger(__name__)


async def repeat(action: Callable[[], Awaitable[T | None]], pause_s: tuple[float, float]) -> T:
    """After pauses of random length, until it returns something. What goes wrong once must not end a server."""
    while True:
        await asyncio.sleep(random.uniform(*pause_s))
        try:
            result = await action()
        except Exception:
            _logger.exception("a server's routine failed; it is tried again")
        else:
            if result is not None:
                return result
