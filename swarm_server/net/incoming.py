"""The messages of one stream, as a request reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import torch

from swarm_protocol.errors import RequestRejected, SessionLost
from swarm_protocol.wire.codec import Assembler


class Incoming:
    """Reads a client's stream, in which silence may last ``idle_timeout_s``."""

    def __init__(self, messages: AsyncIterator[Any], idle_timeout_s: float) -> None:
        self._messages = messages
        self._idle_timeout_s = idle_timeout_s

    async def next(self) -> Any:
        """The next message; None at the end of the stream. Raises SessionLost after too long a silence."""
        try:
            return await asyncio.wait_for(anext(self._messages, None), self._idle_timeout_s)
        except TimeoutError:
            raise SessionLost(f"the session was closed after {self._idle_timeout_s:g} s without a request") from None

    async def first(self, *kinds: str) -> Any:
        """The next message, which must be of one of these kinds; raises RequestRejected if it is not."""
        message = await self.next()
        if message is None or message.WhichOneof("kind") not in kinds:
            raise RequestRejected(f"expected a message of kind {' or '.join(map(repr, kinds))}")
        return message

    async def collect(self, assembler: Assembler) -> torch.Tensor:
        """The tensor that begins in ``assembler``, with its further parts."""
        while not assembler.complete:
            part = (await self.first("more")).more
            if not part:
                raise RequestRejected("a part of a tensor is empty")
            assembler.add(part)
        return assembler.tensor()
