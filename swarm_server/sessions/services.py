"""What sessions, and passes without one, are given of the span that is hosted. They are not known here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from swarm_server.adapters.store import AdapterStore
from swarm_server.core.counters import Counters
from swarm_server.engine.engine import Engine
from swarm_server.engine.scheduler import Scheduler
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.net.neighbours import Neighbours
from swarm_server.net.validation import RequestValidator
from swarm_server.training.gradient_sums import GradientSums
from swarm_server.training.training_memory import TrainingMemory


@dataclass(frozen=True)
class SpanServices:
    """One for each hosted span.

    Attributes:
        engine: is called on the thread of ``scheduler`` only.
        neighbours: other servers; connections to them stay when the server moves.
        placing: held while an adapter is read, which takes twice its size.
    """

    engine: Engine
    scheduler: Scheduler
    budget: CacheBudget
    validator: RequestValidator
    neighbours: Neighbours
    training: TrainingMemory
    adapters: AdapterStore = field(default_factory=AdapterStore)
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    counters: Counters = field(default_factory=Counters)

    @property
    def sums(self) -> GradientSums:
        """Of the adapters' gradients."""
        return GradientSums(self.adapters)
