"""Reads from the DHT which servers hold which blocks, and joins the swarm again when all known members are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, TypeVar

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.errors import SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span

Join = Callable[[ClientConfig], Awaitable[Dht]]
T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Discovery:
    """A client's DHT node, which is replaced when all nodes that it knew are gone, or when its libp2p daemon has ended.
    All methods run on the background loop."""

    def __init__(self, config: ClientConfig, join: Join, dht: Dht | None = None) -> None:
        """Keep ``join``, which finds the swarm through initial peers, or through servers registered on this machine."""
        self._config = config
        self._join = join
        self._dht = dht
        self._joining: asyncio.Task[bool] | None = None
        self._tried_s = -inf
        self._closed = False
        self._closing: set[asyncio.Task[Any]] = set()

    async def join(self) -> None:
        """Join the swarm. Raise NoSwarm if no member answers."""
        if self._dht is None:
            self._dht = await self._join(self._config)

    async def view(self, model: str, num_blocks: int, part: Span | None) -> SwarmView | None:
        """Return the servers that the DHT lists; None if the DHT cannot be read."""
        if not self._joined.is_alive:
            _logger.warning("the libp2p daemon of this client has ended; joining the swarm again")
            await self._rejoin()
        view = await self._in_time(self._joined.view(model, num_blocks, part))
        # A node that knows no other nodes reads only what it has stored itself, so its view cannot be trusted.
        if (view is None or self._joined.is_alone) and await self._rejoin():
            view = await self._in_time(self._joined.view(model, num_blocks, part))
        return view

    async def accusations(self, model: str) -> list[tuple[str, pb.Accusations]]:
        """Return unverified accusations, each with its publisher's peer id; empty if the DHT cannot be read."""
        return await self._in_time(self._joined.accusations(model).read()) or []

    async def close(self) -> None:
        self._closed = True
        if self._joining is not None:
            self._joining.cancel()  # joining can wait long for servers that are frozen
            await asyncio.wait([self._joining])
        await self._joined.shutdown()
        await asyncio.gather(*self._closing)

    @property
    def _joined(self) -> Dht:
        assert self._dht is not None, "join first"
        return self._dht

    async def _in_time(self, reading: Awaitable[T]) -> T | None:
        """Return what is read from the DHT; None if it cannot be read."""
        try:
            async with asyncio.timeout(self._config.timeouts.read_s):
                return await reading
        except (TimeoutError, OSError) as error:
            _logger.info("the DHT cannot be read: %r", error)
            return None

    async def _rejoin(self) -> bool:
        """Return whether the node has been replaced."""
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
