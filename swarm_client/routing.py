"""Which servers compute which blocks. Pure: a function of what the swarm looks like."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarm_protocol.errors import NoRoute
from swarm_protocol.records import ServerRecord, ServerState, SwarmView, missing_spans
from swarm_protocol.span import Span
from swarm_protocol.wire import WIRE_VERSION

ASSUMED_RTT_S = 0.005  # of a server never spoken to
ASSUMED_TOKENS_PER_S = 1.0  # of a server that announced none
NO_ROOM_S = 30.0  # cost of a server whose KV cache looks too full


@dataclass(frozen=True)
class Hop:
    """One server's part of a chain."""

    server: ServerRecord
    span: Span


Chain = tuple[Hop, ...]


def fastest_chain(
    view: SwarmView,
    blocks: Span,
    *,
    rtts_s: Mapping[str, float] | None = None,
    need_tokens: int = 0,
) -> Chain:
    """The hops that carry one token through ``blocks`` soonest.

    The cost of a hop is its round trip, its queue delay, the computing time of its blocks, and a penalty if its KV
    cache has no room for ``need_tokens``. ``view`` holds usable servers only (see ``usable``). Dynamic programming from
    the last block to the first, over servers times blocks.

    Raises:
        NoRoute: naming the blocks that no server holds.
    """
    rtts_s = rtts_s or {}
    servers = sorted(view.servers, key=lambda server: server.peer_id)
    costs = [_costs(server, rtts_s.get(server.peer_id, ASSUMED_RTT_S), need_tokens) for server in servers]
    per_hop, per_block = np.array(costs).reshape(-1, 2).T
    starts = np.array([server.span.start for server in servers])
    ends = np.array([server.span.end for server in servers])
    best = 0.0  # seconds from the block after the one at hand to the end
    through = np.full(len(servers), np.inf)  # the same if that block is computed by this server, its visit not counted
    first: dict[int, int] = {}  # the server to take at a block
    stays: dict[int, np.ndarray] = {}  # which servers had better go on with the block after
    for block in reversed(range(blocks.start, blocks.end)):
        stays[block] = through <= best
        holds = (starts <= block) & (block < ends)
        through = np.where(holds, per_block + np.minimum(through, best), np.inf)
        total = through + per_hop
        if not np.isfinite(total).any():
            raise no_route(view, blocks)
        first[block] = int(total.argmin())
        best = total[first[block]]
    chain, block = [], blocks.start
    while block < blocks.end:
        start, number = block, first[block]
        while stays[block][number] and block + 1 < blocks.end:
            block += 1
        block += 1
        chain.append(Hop(servers[number], Span(start, block)))
    return tuple(chain)


def best_replica(
    view: SwarmView, span: Span, *, rtts_s: Mapping[str, float] | None = None, need_tokens: int = 0
) -> ServerRecord | None:
    """The server that carries one token through the whole of ``span`` soonest; None if no server holds all of it."""
    rtts_s = rtts_s or {}

    def cost(server: ServerRecord) -> tuple[float, str]:
        per_hop, per_block = _costs(server, rtts_s.get(server.peer_id, ASSUMED_RTT_S), need_tokens)
        return per_hop + len(span) * per_block, server.peer_id

    return min((server for server in view.servers if server.span.covers(span)), key=cost, default=None)


def usable(
    view: SwarmView, revision: str, num_blocks: int, banned: Collection[str] = ()
) -> tuple[SwarmView, Sequence[str]]:
    """The servers a client can use, and for each kind of server left out a phrase that says how many and why."""
    kept, reasons = [], {}
    for server in view.servers:
        reason = _unusable(server, revision, num_blocks, banned)
        if reason is None:
            kept.append(server)
        else:
            reasons[reason] = reasons.get(reason, 0) + 1
    phrases = [f"{count} {'server' if count == 1 else 'servers'} {reason}" for reason, count in reasons.items()]
    return SwarmView(tuple(kept)), phrases


def no_route(view: SwarmView, blocks: Span, left_out: Sequence[str] = ()) -> NoRoute:
    """The error that names the blocks of ``blocks`` no server of the view holds."""
    replicas = view.replicas(blocks.end)
    missing = missing_spans([1] * blocks.start + replicas[blocks.start :])
    names = ", ".join(str(span) for span in missing)
    notes = f" (left out: {'; '.join(left_out)})" if left_out else ""
    return NoRoute(f"no server holds blocks {names}{notes}", missing)


def _unusable(server: ServerRecord, revision: str, num_blocks: int, banned: Collection[str]) -> str | None:
    if server.wire_version != WIRE_VERSION:
        return f"of wire version {server.wire_version} where this client speaks {WIRE_VERSION}"
    if server.revision != revision or server.num_blocks != num_blocks:
        return f"with model revision {server.revision} where this client has {revision}"
    if server.state is not ServerState.ONLINE:
        return f"still {server.state.name.lower()}"
    if server.peer_id in banned:
        return "that failed a moment ago"
    return None


def _costs(server: ServerRecord, rtt_s: float, need_tokens: int) -> tuple[float, float]:
    """Seconds per visit, and per block computed."""
    per_hop = rtt_s + server.queue_delay_s
    if server.cache_tokens_left < need_tokens:
        per_hop += NO_ROOM_S
    return per_hop, 1 / (server.tokens_per_s or ASSUMED_TOKENS_PER_S) / len(server.span)
