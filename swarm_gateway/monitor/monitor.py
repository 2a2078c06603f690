"""Observes a swarm as one of its clients does, once or repeatedly."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from math import inf
from typing import Any

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_client.swarm.caller import ClientIdentity
from swarm_client.swarm.discovery import Join
from swarm_client.swarm.swarm import Connect
from swarm_gateway.monitor.model_monitor import MOST, ModelMonitor, ModelStatus
from swarm_protocol.dht.dht import Dht
from swarm_protocol.errors import NoSwarm

_logger = logging.getLogger(__name__)
_SOME = 32  # servers of each model that are asked in a round
_EVERYBODY_S = 6.0  # the time limit for asking all servers
_READ_S = 10.0  # the time limit for reading the DHT
_LATE_S = 5.0  # after this time, the DHT is reported as unreadable
_REJOIN_S = 10.0  # between two attempts to find another way into the swarm


@dataclass(frozen=True)
class SwarmSnapshot:
    """A swarm at one moment.

    Attributes:
        stale_s: how long ago the DHT was read, if it cannot be read now; otherwise None.
        num_strangers: the number of servers that are no members; 0 unless this client asked for a private swarm.
    """

    models: tuple[ModelStatus, ...]
    stale_s: float | None = None
    num_strangers: int = 0


class Monitor:
    """A monitor of all models of one swarm, or of one model. All methods run on the background loop."""

    def __init__(
        self,
        config: ClientConfig,
        model: str | None = None,
        *,
        join: Join | None = None,
        connect: Connect | None = None,
    ) -> None:
        """Prepare without connecting. ``join`` and ``connect`` replace the network."""
        self._caller = caller = ClientIdentity(config)
        self._config = config
        self._model = model
        self._dht: Dht | None = None
        self._join = join or caller.join
        self._connect = connect or caller.connect
        self._models: dict[str, ModelMonitor] = {}
        self._reading: asyncio.Task[Any] | None = None
        self._asking: asyncio.Task[Any] | None = None
        self._readable = True
        self._read_s = -inf  # the time of the last successful read
        self._began_s = inf  # the start of the read under way
        self._joined_s = -inf

    async def look(self) -> SwarmSnapshot:
        """Look once, and ask all servers, or many of them if there are hundreds.

        Raises:
            NoSwarm: no member answers, or no server hosts the model.
        """
        if self._dht is None:
            self._dht, self._joined_s = await self._join(self._config), now_s()
        await self._read()
        # hivemind forgets a peer that answers late, and a node that knows no others reads only what it has stored.
        if self._dht.is_alone and not self._snapshot().models:
            await self._join_again()
            await self._read()
        if self._model is not None and not self._snapshot().models:
            hosted = ", ".join(await self._dht.models())
            raise NoSwarm(
                f"no server of swarm {self._config.swarm!r} hosts model {self._model!r}"
                + (f"; its models: {hosted}" if hosted else "")
            )
        await self._ask(MOST, _EVERYBODY_S)
        return self._snapshot()

    async def look_again(self, wait_s: float) -> SwarmSnapshot:
        """Read the DHT and ask some servers; return what is known after ``wait_s`` or sooner."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read())
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask(_SOME, wait_s))
        done, _ = await asyncio.wait([self._reading, self._asking], timeout=wait_s)
        for task in done:
            task.result()
        return self._snapshot()

    async def peers(self) -> list[str]:
        """Return the multiaddrs of some members that this client is connected to."""
        return [] if self._dht is None else await self._dht.peers()

    async def close(self) -> None:
        for task in (self._reading, self._asking):
            if task is not None:
                task.cancel()
        for model in self._models.values():
            await model.close()
        await self._caller.close()
        if self._dht is not None:
            await self._dht.shutdown()

    def _snapshot(self) -> SwarmSnapshot:
        statuses = [model.status() for model in self._models.values()]
        is_late = not self._readable or now_s() - self._began_s > _LATE_S
        models = tuple(status for status in statuses if status.servers)
        num_strangers = 0 if self._dht is None else self._dht.num_strangers
        return SwarmSnapshot(models, now_s() - self._read_s if is_late else None, num_strangers)

    async def _ask(self, most: int, timeout_s: float) -> None:
        await asyncio.gather(*(model.ask(most, timeout_s) for model in self._models.values()))

    async def _read(self) -> None:
        self._began_s = now_s()
        try:
            async with asyncio.timeout(_READ_S):
                self._readable = await self._read_models()
        except (TimeoutError, OSError) as error:
            _logger.info("the DHT cannot be read: %r", error)
            self._readable = False
        if self._readable:
            self._read_s = now_s()
        if (not self._readable or self._all_silent()) and now_s() - self._joined_s >= _REJOIN_S:
            await self._join_again()
        self._began_s = inf

    async def _read_models(self) -> bool:
        """Read all models; return False and change nothing if no models are found although there were some."""
        dht = self._dht
        assert dht is not None  # the swarm was joined
        models = await dht.models()
        if not models and self._models:
            return False
        models = {name: count for name, count in models.items() if self._model in (None, name)}
        views = await asyncio.gather(*(dht.view(name, count) for name, count in models.items()))
        for name in [name for name, known in self._models.items() if models.get(name) != known.num_blocks]:
            await self._models.pop(name).close()
        for (name, num_blocks), view in zip(models.items(), views, strict=True):
            if name not in self._models:
                self._models[name] = ModelMonitor(self._config, name, num_blocks, self._connect)
            self._models[name].see(view)
        return True

    def _all_silent(self) -> bool:
        """Return whether no server answers. The DHT may then show only what this node has stored before."""
        servers = [server for model in self._models.values() for server in model.status().servers]
        return bool(servers) and not any(server.answers for server in servers)

    async def _join_again(self) -> None:
        """Join again: all servers through which this client was connected may be gone, and others may have come."""
        self._joined_s = now_s()
        try:
            dht = await self._join(self._config)
        except NoSwarm as error:
            _logger.info("%s", error)
            return
        old, self._dht = self._dht, dht
        if old is not None:
            await old.shutdown()
