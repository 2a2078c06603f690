"""The services of a hosted span that sessions and sessionless passes use. This file imports neither of the two."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from swarm_server.adapters.store import AdapterStore
from swarm_server.core.counters import Counters
from swarm_server.engine.engine import Engine
from swarm_server.engine.scheduler import Scheduler
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.offload import KvOffload
from swarm_server.net.neighbours import Neighbours
from swarm_server.net.validation import RequestValidator
from swarm_server.training.gradient_sums import GradientSums
from swarm_server.training.training_memory import TrainingMemory


@dataclass(frozen=True)
class SpanServices:
    """The services of one hosted span.

    Attributes:
        engine: the engine, which is called only on the thread of ``scheduler``.
        neighbours: the connections to other servers, which stay open when the server moves to other blocks.
        offload: the room for keys and values outside the cache.
        placing: the lock that is held while an adapter is read, because reading takes twice the adapter's size.
    """

    engine: Engine
    scheduler: Scheduler
    budget: CacheBudget
    validator: RequestValidator
    neighbours: Neighbours
    training: TrainingMemory
    adapters: AdapterStore = field(default_factory=AdapterStore)
    offload: KvOffload = field(default_factory=KvOffload)
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    counters: Counters = field(default_factory=Counters)

    @property
    def sums(self) -> GradientSums:
        """Return the sums of the adapters' gradients."""
        return GradientSums(self.adapters)
