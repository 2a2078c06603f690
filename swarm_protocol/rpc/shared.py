"""Work whose result several callers wait for, and the difference between its cancellation and theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from swarm_protocol.errors import PeerUnavailable

T = TypeVar("T")


class SharedReading:
    """A shared read of changing data: concurrent callers share reads, and reads run one at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_begun = self._last_ended = 0

    @property
    def is_under_way(self) -> bool:
        return self._lock.locked()

    async def after_now(
        self, read: Callable[[], Awaitable[Any]], pause: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        """Wait for a read that begins after this call: another caller's, or a new one after ``pause``.

        A read that raises does not count.
        """
        awaited = self._num_begun + 1  # the first read that begins after this call
        async with self._lock:
            if self._last_ended >= awaited:  # another caller has read while this one waited for the lock
                return
            if pause is not None:
                await pause()
            self._num_begun = number = self._num_begun + 1
            await read()
            self._last_ended = number


async def result_of(task: asyncio.Future[T], peer_id: str = "") -> T:
    """Return or raise the task's result; the task goes on if the waiter is cancelled.

    Raises PeerUnavailable if the task itself was cancelled because connections are being closed. ``CancelledError``
    would look as if the waiter had been cancelled.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled() and not is_cancelled():
            raise PeerUnavailable("the connection was closed", peer_id) from None
        raise


def has_result(task: asyncio.Future[Any]) -> bool:
    """Return whether the task has ended without an error."""
    return task.done() and not task.cancelled() and task.exception() is None


def is_cancelled() -> bool:
    """Return whether the current task itself is being cancelled, rather than the task that it awaits."""
    return num_cancellations() > 0


def num_cancellations() -> int:
    """Return how many requests to cancel the current task have not been taken back (see ``Task.cancelling``)."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
