"""A generation as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from functools import partial
from weakref import WeakValueDictionary

from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import Item, Request, TokenListener
from swarm_client.batching.row import BatchRow


class _Mailbox:
    """The items on their way to the readers of one event loop, which is woken once for all items of a pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[asyncio.Queue[Item | BaseException], Item | BaseException]] = deque()
        self._is_woken = False

    def put(self, to: asyncio.Queue[Item | BaseException], item: Item | BaseException) -> None:
        """Pass an item on to its queue. Any thread may call this. Raise RuntimeError if the event loop has gone."""
        self._items.append((to, item))
        if not self._is_woken or self._loop.is_closed():
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # before the items are taken, so that a later item wakes the loop again
        while self._items:
            to, item = self._items.popleft()
            to.put_nowait(item)


_mailboxes: WeakValueDictionary[int, _Mailbox] = WeakValueDictionary()  # by the id() of the event loop that each holds


def _mailbox() -> _Mailbox:
    """Return the mailbox of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _mailboxes.get(id(loop))
    if found is None:
        found = _mailboxes[id(loop)] = _Mailbox(loop)
    return found


async def stream(batcher: GenerationLoop, request: Request) -> AsyncGenerator[Item, None]:
    """Yield the tokens as they come, and at last the reason of the end.

    If the request asks for them, the scored prompt comes first, and servers and their events come among the tokens.

    A reader that stops must close the iterator (``aclose``), which cancels the generation.

    Raises:
        ValueError: see ``GenerationLoop.submit``.
        SwarmError: see ``swarm_protocol.errors``.
    """
    items: asyncio.Queue[Item | BaseException] = asyncio.Queue()
    listener = partial(_mailbox().put, items)
    generation = await _submitted(batcher, request, listener) if request.pictures else batcher.submit(request, listener)
    try:
        while True:
            item = await items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if isinstance(item, str):
                return
    finally:
        generation.cancel()


async def _submitted(batcher: GenerationLoop, request: Request, listener: TokenListener) -> BatchRow:
    """Submit a request on another thread, because its pictures are computed there. Cancel it if the reader stops."""
    submitting = asyncio.ensure_future(asyncio.to_thread(batcher.submit, request, listener))

    def cancel(done: asyncio.Future[BatchRow]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().cancel()

    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(cancel)
        raise
