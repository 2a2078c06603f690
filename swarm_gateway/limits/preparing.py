"""The preparation of requests in threads, before their generations take places: text becomes tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from swarm_gateway.limits.admission import ApiError, RequestAdmission

T = TypeVar("T")
_LONG_BYTES = 64 * 1024  # of a body; tokenizing this much text takes about 40 ms
_RETRY_S = 5


async def beside_streams(num_bytes: int, read: Callable[[], T]) -> T:
    """Return what ``read`` makes of a body of so many bytes; that of a long one takes up to seconds, so in a thread."""
    return await asyncio.to_thread(read) if num_bytes > _LONG_BYTES else read()


class Preparations:
    """The preparation of requests: short ones at once, long ones one by one, which leaves threads and memory to others.

    Long requests take turns, round robin over keys: see ``LocalAdmission``. A long request whose client leaves before
    its turn is not prepared. One event loop must make all calls.
    """

    def __init__(self, admission: RequestAdmission) -> None:
        self._admission = admission

    async def run(self, key: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, or raise what it raises.

        Raises:
            ApiError: too many long requests wait, or the gateway is ending.
        """
        if num_bytes <= _LONG_BYTES:
            return await asyncio.to_thread(work)
        try:
            (place,) = await self._admission.join(key, 1, "preparations")
        except ApiError as error:
            if error.status != 429:  # such as that of a gateway that is ending
                raise
            message = "too many long prompts wait to be made into tokens: try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=_RETRY_S) from None
        try:
            await place.turn.wait()
        except asyncio.CancelledError:
            place.leave()
            raise
        working = asyncio.ensure_future(asyncio.to_thread(work))

        def ended(working: asyncio.Task[T]) -> None:
            place.leave()
            if not working.cancelled():
                working.exception()  # marks the error as seen, because the client may have left

        working.add_done_callback(ended)  # not earlier, because the thread goes on if the client leaves
        return await asyncio.shield(working)
