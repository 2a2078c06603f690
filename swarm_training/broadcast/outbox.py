"""The queue of statements for one peer, sent in order and in small batches, with retries until they arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from swarm_protocol.errors import SwarmError
from swarm_training.pb import training_robust_pb2 as pb

MAX_STATEMENTS = 64  # in one request
_MAX_BYTES = 1 << 20
_MAX_WAITING = 4096  # older ones are dropped
_RETRY_S = 0.2
_TIMEOUT_S = 10.0


class BroadcastOutbox:
    def __init__(self, tell: Callable[[pb.TellRequest], Awaitable[None]]) -> None:
        self._tell = tell
        self._waiting: deque[pb.Statement] = deque(maxlen=_MAX_WAITING)
        self._some = asyncio.Event()
        self._is_ending = False
        self._task = asyncio.ensure_future(self._run())

    def put(self, statement: pb.Statement) -> None:
        self._waiting.append(statement)
        self._some.set()

    def finish(self) -> None:
        """Send what is waiting, unless the peer cannot be reached, and then end."""
        self._is_ending = True
        self._some.set()

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while not self._is_ending or self._waiting:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                request = self._next()
                while not await self._is_told(request):
                    if self._is_ending:
                        return
                    await asyncio.sleep(_RETRY_S)

    def _next(self) -> pb.TellRequest:
        statements, size = [self._waiting.popleft()], 0
        while self._waiting and len(statements) < MAX_STATEMENTS:
            size += statements[-1].ByteSize()
            if size + self._waiting[0].ByteSize() > _MAX_BYTES:
                break
            statements.append(self._waiting.popleft())
        return pb.TellRequest(statements=statements)

    async def _is_told(self, request: pb.TellRequest) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._tell(request)
        except (SwarmError, TimeoutError):
            return False
        return True
