"""How a client reads who serves what, and joins its swarm again when nobody answers whom it knew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.errors import SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span

Join = Callable[[ClientConfig], Awaitable[Dht]]
_logger = logging.getLogger(__name__)


class Discovery:
    """A client's DHT node, replaced by another when it is of no use any more: all the nodes it knew are gone, or its
    libp2p daemon is. All methods run on the background loop."""

    def __init__(self, config: ClientConfig, join: Join, dht: Dht | None = None) -> None:
        """``join`` finds the swarm through initial peers, or through the servers registered on this machine."""
        self._config = config
        self._join = join
        self._dht = dht
        self._joining: asyncio.Task[bool] | None = None
        self._tried_s = -inf
        self._closed = False
        self._closing: set[asyncio.Task[Any]] = set()

    async def join(self) -> None:
        """Raises NoSwarm if nobody answers."""
        if self._dht is None:
            self._dht = await self._join(self._config)

    async def view(self, model: str, num_blocks: int, part: Span | None) -> SwarmView | None:
        """What the DHT says; None if it cannot be read."""
        if not self._joined.is_alive:
            _logger.warning("the libp2p daemon of this client has ended; joining the swarm again")
            await self._rejoin()
        view = await self._read(model, num_blocks, part)
        # What can be read without others is only what this node has stored before.
        if (view is None or self._joined.is_alone) and await self._rejoin():
            view = await self._read(model, num_blocks, part)
        return view

    async def accusations(self, model: str) -> list[tuple[str, pb.Accusations]]:
        """Return what nobody has checked, with the peer ids of the publishers; nothing if the DHT cannot be read."""
        try:
            reading = self._joined.accusations(model).read()
            return await asyncio.wait_for(reading, self._config.timeouts.read_s)
        except (TimeoutError, OSError) as error:
            _logger.info("the DHT cannot be read: %r", error)
            return []

    async def close(self) -> None:
        self._closed = True
        if self._joining is not None:
            self._joining.cancel()  # it may wait for long for servers that are frozen
            await asyncio.wait([self._joining])
        await self._joined.shutdown()
        await asyncio.gather(*self._closing)

    @property
    def _joined(self) -> Dht:
        assert self._dht is not None, "join first"
        return self._dht

    async def _read(self, model: str, num_blocks: int, part: Span | None) -> SwarmView | None:
        try:
            return await asyncio.wait_for(self._joined.view(model, num_blocks, part), self._config.timeouts.read_s)
        except (TimeoutError, OSError) as error:
            _logger.info("the DHT cannot be read: %r", error)
            return None

    async def _rejoin(self) -> bool:
        """Whether the node was replaced by now."""
        if self._joining is None or self._joining.done():
            if now_s() - self._tried_s < self._config.timeouts.rejoin_after_s or self._closed:
                return False
            self._joining = asyncio.ensure_future(self._replace())
        await asyncio.wait([self._joining], timeout=self._config.timeouts.rejoin_s)
        return self._joining.done() and not self._joining.cancelled() and self._joining.result()

    async def _replace(self) -> bool:
        try:
            dht = await self._join(self._config)
        except (SwarmError, ValueError, OSError) as error:
            _logger.info("the swarm cannot be joined again: %s", error)
            return False
        finally:
            self._tried_s = now_s()
        old, self._dht = self._joined, dht
        closing = asyncio.ensure_future(old.shutdown())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        _logger.info("joined the swarm again")
        return True
