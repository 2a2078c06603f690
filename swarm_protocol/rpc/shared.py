"""Work that several wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from swarm_protocol.errors import PeerUnavailable

T = TypeVar("T")


class SharedReading:
    """Reads something again for all who ask for it, one reading after the other."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_begun = self._last_ended = 0

    @property
    def is_under_way(self) -> bool:
        return self._lock.locked()

    async def after_now(
        self, read: Callable[[], Awaitable[Any]], pause: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        """Returns when a reading has ended that began after the call: this one's, after the pause, or another's.

        One that raises has not ended.
        """
        awaited = self._num_begun + 1
        async with self._lock:
            if self._last_ended >= awaited:
                return
            if pause is not None:
                await pause()
            self._num_begun = number = self._num_begun + 1
            await read()
            self._last_ended = number


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
