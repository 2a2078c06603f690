"""Repetition of a server's periodic work."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
_logger = logging.getLogger(__name__)


async def repeat(action: Callable[[], Awaitable[T | None]], pause_s: tuple[float, float]) -> T:
    """Repeat the action after random pauses until it returns a result; an error must not end the server."""
    while True:
        await asyncio.sleep(random.uniform(*pause_s))
        try:
            result = await action()
        except Exception:  # whatever it is, the server goes on
            _logger.exception("a server's routine failed; it is tried again")
        else:
            if result is not None:
                return result
