"""A swarm in virtual time: servers come, load, serve, move and go as a policy says; what it can carry is measured.

What others see of a server is ``SEEN_AFTER_S`` old; a server that crashed stays in everybody's view for ``GHOST_S``.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from math import inf

import numpy as np
from churn import HOUR_S, Life, Scenario
from metrics import Gap, Metrics

from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_server.placement.capacity import Coverage

SEEN_AFTER_S = 1.0
GHOST_S = 5.0  # the first failed contacts, not the record's lifetime, end it
DRAIN_S = (1.0, 10.0)
AT_REST_S = 600.0  # the end of the time without churn: who moves now moves needlessly


class Server:
    """What a server knows of itself."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.alive = True
        self.span: Span | None = None  # None: it has not chosen, or holds nothing at the moment
        self.state = ServerState.JOINING

    @property
    def peer_id(self) -> str:
        return self.life.peer_id

    @property
    def tokens_per_s(self) -> float:
        return self.life.speed / self.life.num_hosted


class Policy(ABC):
    """Where servers go, and when they go elsewhere."""

    name: str

    def begin(self, swarm: VirtualSwarm) -> None:
        self.swarm = swarm

    @abstractmethod
    def join(self, server: Server) -> None:
        """Finds it a place and lets it ``load``."""

    def serve(self, server: Server) -> None:  # noqa: B027
        """It has loaded, and is ONLINE from now on. Who never moves does nothing about it."""


class VirtualSwarm:
    """Runs one scenario under one policy.

    Args:
        first_spans: where those are that are there when the run begins, by peer id.
        view_s: those who ask whether to move read the same view for so long, so that they find the same plan.
        sample_s: how often the throughput is measured.
        optimum: what servers of these lengths and speeds could carry, wherever they were.
    """

    def __init__(
        self,
        scenario: Scenario,
        lives: Sequence[Life],
        first_spans: dict[str, Span],
        policy: Policy,
        seed: int,
        view_s: float = 0.0,
        sample_s: float = 2.0,
        optimum: Callable[[Coverage], float] = Coverage.upper_bound,
    ) -> None:
        self.scenario = scenario
        self.num_blocks = scenario.num_blocks
        self.chance = random.Random(seed)
        self.now = 0.0
        self.metrics = Metrics()
        self._policy, self._find_optimum = policy, optimum
        self._view_s, self._sample_s = view_s, sample_s
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._visible: dict[str, ServerRecord] = {}
        self._view: SwarmView | None = None  # None: something has changed
        self._shared_view: tuple[float, SwarmView] | None = None  # when it was read
        self._servers: dict[str, Server] = {}
        self._replicas = np.zeros(self.num_blocks, int)
        self._gap: Gap | None = None
        self._sampled: tuple[float, float] | None = None  # throughput and lowest block; None: to be computed
        self._there: set[Life] = set()
        self._optimum: float | None = None
        policy.begin(self)
        for life in lives:
            self.at(life.born_s, lambda life=life: self._be_born(life, first_spans.get(life.peer_id)))
            if life.gone_s < inf:
                self.at(life.gone_s, lambda life=life: self._end(self._servers[life.peer_id]))
        self.at(0.0, self._sample)

    def run(self) -> Metrics:
        end_s = self.scenario.end_s
        while self._queue and self._queue[0][0] < end_s:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if self._gap:
            self._gap.until = end_s
        return self.metrics

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._numbers), action))

    # ------------------------------------------------------------ for policies

    def later(self, server: Server, delay_s: float, action: Callable[[], None]) -> None:
        """Unless the server is gone by then."""
        self.at(self.now + delay_s, lambda: server.alive and action())

    def view(self) -> SwarmView:
        """What everybody sees; the same object until something changes."""
        if self._view is None:
            self._view = SwarmView(tuple(self._visible.values()))
        return self._view

    def shared_view(self) -> SwarmView:
        """The same, up to ``view_s`` older."""
        if self._shared_view is None or self.now - self._shared_view[0] >= self._view_s:
            self._shared_view = self.now, self.view()
        return self._shared_view[1]

    def publish(self, server: Server, next_span: Span | None = None) -> None:
        record = self._record(server, next_span)
        self.at(self.now + SEEN_AFTER_S, lambda: self._see(server.peer_id, record))

    def withdraw(self, server: Server, seen_after_s: float = SEEN_AFTER_S) -> None:
        """Its record."""
        self.at(self.now + seen_after_s, lambda: self._see(server.peer_id, None))

    def set_state(self, server: Server, state: ServerState, moves: bool = False) -> None:
        """``moves``: the server stops serving of its own accord."""
        before, server.state = server.state, state
        if (before is ServerState.ONLINE) != (state is ServerState.ONLINE):
            self._replicas[server.span.start : server.span.end] += 1 if state is ServerState.ONLINE else -1
            self._sampled = None
            self._watch_gaps(moves)

    def load(self, server: Server, span: Span) -> None:
        """Its record says JOINING until it is ONLINE."""
        server.span = span
        self.set_state(server, ServerState.JOINING)
        self.publish(server)
        self.later(server, server.life.loading_s, lambda: self._come_online(server))

    def count_move(self) -> None:
        self.metrics.moves += self.now < self.scenario.churn_s
        self.metrics.moves_at_rest += self.now > self.scenario.end_s - AT_REST_S

    # ------------------------------------------------------------ births and ends

    def _be_born(self, life: Life, span: Span | None) -> None:
        server = self._servers[life.peer_id] = Server(life)
        if span is None:
            self.at(self.now + life.loading_s, lambda: server.alive and self._count_in(life))
            self._policy.join(server)
        else:
            server.span = span
            self._count_in(life)
            self._come_online(server)

    def _come_online(self, server: Server) -> None:
        self.set_state(server, ServerState.ONLINE)
        self.publish(server)
        self._policy.serve(server)

    def _count_in(self, life: Life) -> None:
        self._there.add(life)
        self._optimum = None

    def _end(self, server: Server) -> None:
        """A server that leaves takes no new work from now on, so that its speed is gone as well."""
        server.alive = False
        self._there.discard(server.life)
        self._optimum = None
        self.set_state(server, ServerState.DRAINING)
        if self._gap and not self._could_cover():
            self._gap.coverable = False
        if server.life.crashes or server.span is None:
            self.withdraw(server, GHOST_S)
        else:
            self.publish(server)
            self.withdraw(server, SEEN_AFTER_S + self.chance.uniform(*DRAIN_S))
        del self._servers[server.peer_id]

    def _record(self, server: Server, next_span: Span | None = None) -> ServerRecord:
        return ServerRecord(
            server.peer_id,
            (),
            "model",
            "revision",
            self.num_blocks,
            server.span,
            server.state,
            tokens_per_s=server.tokens_per_s,
            forward_tokens_per_s=server.tokens_per_s,
            next_span=next_span,
        )

    def _see(self, peer_id: str, record: ServerRecord | None) -> None:
        if record is None:
            self._visible.pop(peer_id, None)
        else:
            self._visible[peer_id] = record
        self._view = None

    # ------------------------------------------------------------ measuring

    def _watch_gaps(self, by_move: bool) -> None:
        missing = not self._replicas.all() and self.now > 0
        if missing and self._gap is None:
            self._gap = Gap(self.now, coverable=self._could_cover(), by_move=by_move)
            self.metrics.gaps.append(self._gap)
        elif not missing and self._gap:
            self._gap.until, self._gap = self.now, None

    def _could_cover(self) -> bool:
        return sum(life.num_hosted for life in self._there) >= self.num_blocks

    def online(self) -> Coverage:
        """Of those that serve at this moment."""
        servers = [server for server in self._servers.values() if server.state is ServerState.ONLINE]
        return self.layout([(server.span, server.life.speed) for server in servers])

    def online_view(self) -> SwarmView:
        return SwarmView.of(
            self._record(server) for server in self._servers.values() if server.state is ServerState.ONLINE
        )

    def layout(self, placed: Sequence[tuple[Span, float]]) -> Coverage:
        return Coverage(
            self.num_blocks,
            tuple(map(str, range(len(placed)))),
            np.array([span.start for span, _ in placed], int),
            np.array([span.end for span, _ in placed], int),
            np.array([speed for _, speed in placed], float),
            np.ones(len(placed), bool),
        )

    def there(self) -> Coverage:
        """Those that the optimum may place: who is here and has had time to load, whatever its policy."""
        servers = sorted(self._there, key=lambda life: life.peer_id)
        return self.layout([(Span(0, life.num_hosted), life.speed) for life in servers])

    def _sample(self) -> None:
        if self._sampled is None:
            layout = self.online()
            self._sampled = layout.balance().tokens_per_s, min(layout.block_sums())
        if self._optimum is None:
            self._optimum = self._find_optimum(self.there()) if self._could_cover() else 0.0
        metrics, step_h = self.metrics, self._sample_s / HOUR_S
        if self.now < self.scenario.churn_s:
            metrics.num_measured += 1
            metrics.server_hours += len(self._servers) * step_h
        elif self.now > self.scenario.end_s - AT_REST_S:
            metrics.server_hours_at_rest += len(self._servers) * step_h
        carried, lowest_block = self._sampled
        metrics.times.append(self.now)
        metrics.carried.append(carried)
        metrics.optimum.append(self._optimum)
        metrics.lowest_block.append(lowest_block)
        metrics.mean_block.append(sum(life.speed for life in self._there) / self.num_blocks)
        self.at(self.now + self._sample_s, self._sample)
