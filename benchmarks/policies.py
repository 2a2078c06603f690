"""How simulated servers find their blocks: by our placement, with and without moving later, and by Petals' policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import petals_policy
from petals_policy import Placed
from virtual_swarm import DRAIN_S, Policy, Server, VirtualSwarm

from swarm_protocol.dht.records import ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_server.placement import placement
from swarm_server.placement.placement import (
    CHECK_S,
    CONFIRM_S,
    URGENT_DRAIN_S,
    choose_span,
    may_leave,
    others_first,
    own_move,
)


class NoRebalancing(Policy):
    """Servers choose with ``choose_span`` when they come, and stay."""

    name = "no rebalancing"

    def join(self, server: Server) -> None:
        server.span = self._choose(server, self.swarm.view())
        self.swarm.publish(server)

        def choose_again() -> None:
            self.swarm.load(server, self._choose(server, others_first(self.swarm.view(), server.peer_id)))

        self.swarm.later(server, CONFIRM_S, choose_again)

    def _choose(self, server: Server, view: SwarmView) -> Span:
        return choose_span(view, self.swarm.num_blocks, server.life.num_hosted, server.tokens_per_s)


class Swarm(NoRebalancing):
    """Our servers: they also move, by ``own_move`` and ``may_leave``, draining first."""

    name = "swarm"

    def __init__(self, margin: float = placement.MARGIN) -> None:
        self.margin = margin

    def serve(self, server: Server) -> None:
        swarm = self.swarm
        swarm.later(server, swarm.chance.uniform(*CHECK_S), lambda: self._check(server))

    def begin(self, swarm: VirtualSwarm) -> None:
        super().begin(swarm)
        self._view: SwarmView | None = None
        self._movers: set[str] = set()

    def _check(self, server: Server) -> None:
        swarm, view = self.swarm, self.swarm.shared_view()
        if view is not self._view:
            self._view = view
            self._movers = {move.peer_id for move in placement.plan_moves(view, swarm.num_blocks, self.margin)}
        target = None
        if server.peer_id in self._movers:  # others have no move of their own: not asked, to save time
            target = own_move(view, server.peer_id, swarm.num_blocks, self.margin)
        if target is None:
            self.serve(server)
            return
        swarm.publish(server, target)
        swarm.later(server, CONFIRM_S, lambda: self._leave_or_stay(server, target))

    def _leave_or_stay(self, server: Server, target: Span) -> None:
        swarm, view = self.swarm, self.swarm.view()
        if may_leave(view, server.peer_id, swarm.num_blocks):
            swarm.count_move()
            swarm.set_state(server, ServerState.DRAINING, moves=True)
            swarm.publish(server, target)
            limit_s = DRAIN_S[1] if all(view.replicas(swarm.num_blocks)) else URGENT_DRAIN_S
            swarm.later(server, min(swarm.chance.uniform(*DRAIN_S), limit_s), lambda: swarm.load(server, target))
        else:
            swarm.publish(server)
            self.serve(server)


class Petals(Policy):
    """Petals' servers, by our reading of its code; they move without draining.

    Args:
        exact_up_to: in larger swarms, where all others would settle is imagined once per view, not by each server.
    """

    name = "Petals' policy"

    def __init__(self, exact_up_to: int) -> None:
        self._exact_up_to = exact_up_to

    def begin(self, swarm: VirtualSwarm) -> None:
        super().begin(swarm)
        self._view: SwarmView | None = None
        self._servers: dict[str, Placed] = {}
        self._settled: float | None = None

    def join(self, server: Server) -> None:
        def choose() -> None:
            sums = petals_policy.block_sums(_placed(self.swarm.view()), self.swarm.num_blocks)
            self.swarm.load(server, petals_policy.best_window(sums, server.life.num_hosted))

        self.swarm.later(server, self.swarm.chance.uniform(*petals_policy.CHOICE_S), choose)

    def serve(self, server: Server) -> None:
        self.swarm.later(server, self.swarm.chance.uniform(*petals_policy.CHECK_S), lambda: self._check(server))

    def _check(self, server: Server) -> None:
        swarm = self.swarm
        if self._is_better_elsewhere(server):
            swarm.set_state(server, ServerState.OFFLINE, moves=True)
            swarm.withdraw(server)
            swarm.count_move()
            server.span = None
            self.join(server)
        else:
            self.serve(server)

    def _is_better_elsewhere(self, server: Server) -> bool:
        swarm, view = self.swarm, self.swarm.shared_view()
        if view is not self._view:
            self._view, self._servers, self._settled = view, _placed(view), None
            self._sums = petals_policy.block_sums(self._servers, swarm.num_blocks)
        servers = self._servers
        if server.peer_id not in servers or not petals_policy.wants_to_move(servers, server.peer_id, self._sums):
            return False
        if self._settled is None or len(servers) <= self._exact_up_to:
            self._settled = petals_policy.settled(servers, server.peer_id, swarm.num_blocks, swarm.chance)
        return petals_policy.is_unbalanced(float(self._sums.min()), self._settled)


def _placed(view: SwarmView) -> dict[str, Placed]:
    """All but those that leave; their throughput as Petals' servers would announce it."""
    return {
        server.peer_id: Placed(server.span, server.forward_tokens_per_s)
        for server in view.servers
        if server.state in (ServerState.JOINING, ServerState.ONLINE)
    }


@contextmanager
def shared_plans() -> Iterator[None]:
    """Servers that read the same view find the same plan, so that it is computed once; nothing else changes."""
    with patch.object(placement, "plan_moves", _remember_last(placement.plan_moves)):
        yield


def _remember_last(plan: Callable[..., Any]) -> Callable[..., Any]:
    last: dict[str, Any] = {}

    def planned(view: SwarmView, *arguments: Any) -> Any:
        if last.get("view") is not view:
            last.update(view=view, moves=plan(view, *arguments))
        return last["moves"]

    return planned
