"""What is done to a request before its generations take their places, in threads: its text becomes tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LONG_BYTES = 64 * 1024  # of a body: to make tokens of it takes some 40 ms


class Preparations:
    """Short requests are prepared at once, and long ones one after the other: they leave threads and memory to others.

    A long request whose client leaves before its turn is not prepared at all. For one event loop.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, or raise what it raises. ``num_bytes``: size of the request's body."""
        if num_bytes <= _LONG_BYTES:
            return await asyncio.to_thread(work)
        await self._turn.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(work))
        working.add_done_callback(self._ended)  # not before: the thread goes on, also if the client leaves
        return await asyncio.shield(working)

    def _ended(self, working: asyncio.Task[T]) -> None:
        self._turn.release()
        if not working.cancelled():
            working.exception()  # nobody may be there any more whom it could be raised to
