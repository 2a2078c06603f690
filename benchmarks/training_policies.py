"""How simulated peers find the stage they train: at random, where the run needs them, and by moving later as well."""

from __future__ import annotations

from dataclasses import dataclass

from churn import Life
from virtual_swarm import Policy, Server, VirtualSwarm

from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_server.placement.capacity import Coverage
from swarm_training.stages.placement.stage_choice import (
    CHECK_S,
    CONFIRM_S,
    COOLDOWN_S,
    MARGIN,
    PlacedPeer,
    PlacementView,
    StageMove,
    choose_stage,
    may_go,
    own_move,
    plan_moves,
)

LEAVE_S = (1.0, 5.0)  # handing sums over to a stage mate, before a peer loads another stage's state


@dataclass(frozen=True)
class PeerLife(Life):
    """Of a peer that holds one stage; speed in micro-batches per second, ``load_s`` to fetch a stage's state."""

    load_s: float = 60.0

    @property
    def loading_s(self) -> float:
        return self.load_s


class StagePolicy(Policy):
    """Stage k is the span k:k+1."""

    def begin(self, swarm: VirtualSwarm) -> None:
        super().begin(swarm)
        self._seen: SwarmView | None = None
        self._stages: PlacementView | None = None
        self._since: dict[str, float] = {}  # when peers began to work at their stage

    def serve(self, server: Server) -> None:
        self._since[server.peer_id] = self.swarm.now

    def _view(self, of: SwarmView) -> PlacementView:
        """As long as nothing changes, the same object: so that a plan made of it can be shared."""
        if self._stages is None or self._seen is not of:
            peers = (self._peer(record) for record in of.servers if record.state is not ServerState.OFFLINE)
            self._seen, self._stages = of, PlacementView((1.0,) * self.swarm.num_blocks, tuple(peers))
        return self._stages

    def _peer(self, record: ServerRecord) -> PlacedPeer:
        is_working = record.state is ServerState.ONLINE
        next_stage = record.next_span.start if record.next_span else None
        speed = record.tokens_per_s
        has_settled = self.swarm.now - self._since.get(record.peer_id, self.swarm.now) >= COOLDOWN_S
        return PlacedPeer(record.peer_id, record.span.start, speed, is_working, next_stage, has_settled)


class RandomStage(StagePolicy):
    """Peers take any stage, and stay."""

    name = "random stage"

    def join(self, server: Server) -> None:
        stage = self.swarm.chance.randrange(self.swarm.num_blocks)
        self.swarm.load(server, Span(stage, stage + 1))


class SlowestStage(StagePolicy):
    """Peers take the slowest stage when they come, and stay."""

    name = "no rebalancing"

    def join(self, server: Server) -> None:
        server.span = self._choose(server)
        self.swarm.publish(server)

        def choose_again() -> None:
            self.swarm.load(server, self._choose(server))

        self.swarm.later(server, CONFIRM_S, choose_again)

    def _choose(self, server: Server) -> Span:
        stage = choose_stage(self._view(self.swarm.view()), server.peer_id)
        return Span(stage, stage + 1)


class Rebalanced(SlowestStage):
    """They also move."""

    name = "ours"

    def __init__(self, margin: float = MARGIN) -> None:
        self.margin = margin

    def begin(self, swarm: VirtualSwarm) -> None:
        super().begin(swarm)
        self._planned: PlacementView | None = None
        self._plan: dict[str, StageMove] = {}

    def serve(self, server: Server) -> None:
        super().serve(server)
        self._check_later(server)

    def _check_later(self, server: Server) -> None:
        self.swarm.later(server, self.swarm.chance.uniform(*CHECK_S), lambda: self._check(server))

    def _check(self, server: Server) -> None:
        swarm, view = self.swarm, self._view(self.swarm.shared_view())
        if view is not self._planned:
            self._planned, self._plan = view, {move.peer_id: move for move in plan_moves(view, self.margin)}
        # Whoever has no move in the shared plan has none of its own: not asked, to save time.
        stage = own_move(view, server.peer_id, self.margin) if server.peer_id in self._plan else None
        if stage is None:
            self._check_later(server)
            return
        target = Span(stage, stage + 1)
        swarm.publish(server, target)
        swarm.later(server, CONFIRM_S, lambda: self._go_or_stay(server, target))

    def _go_or_stay(self, server: Server, target: Span) -> None:
        swarm = self.swarm
        if may_go(self._view(swarm.view()), server.peer_id, self.margin):
            swarm.count_move()
            swarm.set_state(server, ServerState.DRAINING, moves=True)
            swarm.publish(server, target)
            swarm.later(server, swarm.chance.uniform(*LEAVE_S), lambda: swarm.load(server, target))
        else:
            swarm.publish(server)
            self._check_later(server)


def most_of_all_assignments(layout: Coverage) -> float:
    """What no assignment of these peers to stages exceeds: an even share of all, or the fastest of so few peers as
    some stage must have."""
    num_each = len(layout.speeds) // layout.num_blocks
    fastest = sorted(layout.speeds.tolist(), reverse=True)[:num_each]
    return float(min(layout.speeds.sum() / layout.num_blocks, sum(fastest)))


def assigned(layout: Coverage) -> float:
    """What an assignment carries that is found by giving each peer, the fastest first, to the slowest stage, and then
    exchanging any two peers as long as that helps (Graham, 1969, and local search)."""
    stages: list[list[float]] = [[] for _ in range(layout.num_blocks)]
    for speed in sorted(layout.speeds.tolist(), reverse=True):
        min(stages, key=sum).append(speed)
    while True:
        poor = min(stages, key=sum)
        before = sum(poor)
        best: tuple[float, int, list[float], int] | None = None
        for rich in stages:
            if rich is poor:
                continue
            has = sum(rich)
            for given, fast in enumerate(rich):
                for taken, slow in enumerate(poor):
                    after = min(before + fast - slow, has - fast + slow)
                    if after > before * (1 + 1e-6) and (best is None or after > best[0]):
                        best = after, given, rich, taken
        if best is None:
            return before
        _, given, rich, taken = best
        rich[given], poor[taken] = poor[taken], rich[given]
