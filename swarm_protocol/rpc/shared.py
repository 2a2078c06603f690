"""Work that several wait for."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from swarm_protocol.errors import PeerUnavailable

T = TypeVar("T")


async def result_of(task: asyncio.Future[T], peer_id: str = "") -> T:
    """What it returns or raises; it goes on if who waits here is cancelled.

    Raises PeerUnavailable if it was cancelled itself: connections are being closed. ``CancelledError`` would have
    who waits taken for cancelled.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled() and not is_cancelled():
            raise PeerUnavailable("the connection was closed", peer_id) from None
        raise


def is_cancelled() -> bool:
    """Whether the task that runs now is asked to end, rather than what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
