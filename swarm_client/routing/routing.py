"""The choice of the servers that compute a chain's blocks. Pure: functions of a view of the swarm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, inf
from statistics import median

import numpy as np

from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import NoRoute
from swarm_protocol.span import Span, runs_without
from swarm_protocol.wire.constants import WIRE_VERSION

ASSUMED_TOKENS_PER_S = 1.0  # the assumed speed of a server that announced none
NO_ROOM_S = 30.0  # the cost of a server whose KV cache looks too full
_STEEPNESS, _MAX_EXCESS = 16.0, 3.0  # curve of prices [0.97 of the optimum with 100 micro-batches, 0.91 with 16]
_MAX_LISTED = 30  # the most servers or adapters that an error message lists
NEWCOMER_FACTOR = 2.0  # how much slower than usual an unproven server is assumed to be
# Relative increase of step times with each further session on a server. On CPUs that is 0.09 to 0.17. The value is
# more than KEEP_MARGIN, so that the second of two sessions takes the other of two equal servers.
SESSION_PRICE = 0.2
PROMPT_CHUNK = 64  # prompt positions that are computed at a time
KEEP_MARGIN = 0.15  # relative: another chain must be faster by more than this to replace the last one


@dataclass(frozen=True)
class Hop:
    """One server's part of a chain."""

    server: ServerRecord
    span: Span


Route = tuple[Hop, ...]


@dataclass(frozen=True)
class Newcomers:
    """The servers whose announced speed is unproven, with the usual speed of the others.

    A newcomer's time is assumed to be the usual one or the announced one, whichever is slower, times
    ``NEWCOMER_FACTOR``. Newcomers therefore get little work until they are proven, whatever they announce.

    Attributes:
        decode_block_s, forward_block_s: the median times of the others for one block and one position.
    """

    peer_ids: frozenset[str] = frozenset()
    decode_block_s: float = 0.0
    forward_block_s: float = 0.0

    @classmethod
    def among(cls, view: SwarmView, peer_ids: Collection[str]) -> Newcomers:
        """Return the newcomers; none if all servers are new, because then each one's announced speed is used."""
        known = [server for server in view.servers if server.peer_id not in peer_ids]
        if not known or len(known) == len(view.servers):
            return cls()
        # Any number of positions above one stands for the speed of forward passes.
        decode, forward = (Costs({}, num_tokens=num_tokens) for num_tokens in (1, 2))
        return cls(
            frozenset(peer_ids),
            median(decode.block_s(server) for server in known),
            median(forward.block_s(server) for server in known) / 2,
        )


@dataclass(frozen=True)
class Costs:
    """A client's knowledge of how long things take, in seconds.

    Attributes:
        rtts_s: the client's round trips to servers, by peer id.
        unknown_rtt_s: the assumed round trip to all other servers.
        pushes: whether servers send hidden states straight to one another; otherwise the client relays all of them.
        num_tokens: the positions that pass at a time; one in decoding.
        need_tokens: the KV room that a server should have, in positions.
        newcomers: the servers whose announced speed is not trusted.
        prices: factors on the computing time, by peer id; 1 if there is none.
        queues_s: the time for work that servers have got from this client and have not done yet, by peer id.
        repeated_tokens: the prompt positions per token of the answer that a server must compute, and that the best
            informed server need not, by peer id.
    """

    rtts_s: Mapping[str, float]
    unknown_rtt_s: float = 0.0
    need_tokens: int = 0
    pushes: bool = True
    num_tokens: int = 1
    prices: Mapping[str, float] = field(default_factory=dict)
    newcomers: Newcomers = Newcomers()
    queues_s: Mapping[str, float] = field(default_factory=dict)
    repeated_tokens: Mapping[str, float] = field(default_factory=dict)

    def rtt_s(self, server: ServerRecord) -> float:
        return self.rtts_s.get(server.peer_id, self.unknown_rtt_s)

    def visit_s(self, server: ServerRecord) -> float:
        """Return the seconds of a visit before computing starts: the queue, and a penalty if there is no room."""
        queue_s = max(server.queue_delay_s, self.queues_s.get(server.peer_id, 0.0))
        return queue_s + (NO_ROOM_S if server.cache_tokens_left < self.need_tokens else 0.0)

    def block_s(self, server: ServerRecord) -> float:
        """Return the seconds of computing one block, for a token and its share of ``repeated_tokens``."""
        block_s = self._compute_s(server, self.num_tokens) * self.prices.get(server.peer_id, 1.0)
        repeated = self.repeated_tokens.get(server.peer_id, 0.0)
        return block_s + (repeated * self._compute_s(server, PROMPT_CHUNK) / PROMPT_CHUNK if repeated else 0.0)

    def _compute_s(self, server: ServerRecord, num_tokens: int) -> float:
        """Return the seconds in which an idle server computes one block for so many positions at once."""
        tokens_per_s = server.tokens_per_s
        if num_tokens > 1:
            tokens_per_s = server.forward_tokens_per_s or tokens_per_s
        block_s = num_tokens / (tokens_per_s or ASSUMED_TOKENS_PER_S) / len(server.span)
        if server.peer_id in self.newcomers.peer_ids:
            is_decode, newcomers = num_tokens == 1, self.newcomers
            usual_s = newcomers.decode_block_s if is_decode else newcomers.forward_block_s * num_tokens
            block_s = NEWCOMER_FACTOR * max(block_s, usual_s)
        return block_s

    def between_s(self, server: ServerRecord, onward: ServerRecord) -> float:
        """Return the one-way seconds between servers: half their round trip, at most the way through the client."""
        by_client_s = (self.rtt_s(server) + self.rtt_s(onward)) / 2
        if not self.pushes:
            return by_client_s
        measured = server.next_hop_rtts_s.get(onward.peer_id), onward.next_hop_rtts_s.get(server.peer_id)
        return min([by_client_s, *(rtt_s / 2 for rtt_s in measured if rtt_s is not None)])


def fastest_chain(view: SwarmView, blocks: Span, costs: Costs, keep: Route = ()) -> Route:
    """Return the hops that carry ``costs.num_tokens`` positions through ``blocks`` soonest.

    The chain ``keep`` is returned instead if it still exists and is hardly slower. ``view`` holds usable servers only.

    Raises:
        NoRoute: no server holds some blocks; the message names them.
    """
    best = _fastest(view, blocks, costs)
    kept = _as_in(view, keep)
    is_over = kept and (kept[0].span.start, kept[-1].span.end) == (blocks.start, blocks.end)
    if is_over and seconds(kept, costs) <= seconds(best, costs) * (1 + KEEP_MARGIN):
        return kept
    return best


def seconds(chain: Route, costs: Costs) -> float:
    """Return the seconds of a pass through the chain: client to first server, from server to server, and back."""
    total = (costs.rtt_s(chain[0].server) + costs.rtt_s(chain[-1].server)) / 2
    for hop in chain:
        total += costs.visit_s(hop.server) + len(hop.span) * costs.block_s(hop.server)
    return total + sum(costs.between_s(hop.server, onward.server) for hop, onward in pairwise(chain))


def spread(view: SwarmView, blocks: Span, sizes: Sequence[int], costs: Costs) -> list[Route]:
    """Return a chain for each of several micro-batches so that all end soon: fast servers get more of them.

    The first one takes the fastest chain. Each further one takes the cheapest chain, where the price of a server's time
    rises exponentially with its load. The busiest server then finishes nearly as soon as possible
    (Aspnes et al., "On-line routing of virtual circuits with applications to load balancing", 1997). For servers of
    equal spans it is a round robin in proportion to their speeds, as in SWARM (Ryabinin et al., 2023).

    Args:
        sizes: the positions (rows x tokens) of each micro-batch.

    Raises:
        NoRoute: no server holds some blocks; the message names them.
    """
    busy_s = {server.peer_id: server.queue_delay_s for server in view.servers}
    chains: list[Route] = []
    for num_tokens in sizes:
        now = replace(costs, num_tokens=num_tokens)
        block_s = {server.peer_id: now.block_s(server) for server in view.servers}
        if chains:
            least_s = min(len(hop.span) * block_s[hop.server.peer_id] for hop in chains[0])
            limit_s = max(busy_s.values()) + least_s
            loads_s = {s.peer_id: busy_s[s.peer_id] + len(s.span) * block_s[s.peer_id] for s in view.servers}
            prices = {p: exp(_STEEPNESS * min(_MAX_EXCESS, load_s / limit_s - 1)) for p, load_s in loads_s.items()}
            now = replace(now, prices=prices)
        chains.append(_fastest(view, blocks, now))
        for hop in chains[-1]:
            busy_s[hop.server.peer_id] += len(hop.span) * block_s[hop.server.peer_id]
    return chains


def _fastest(view: SwarmView, blocks: Span, costs: Costs) -> Route:
    """Return the fastest chain, by dynamic programming from the last block to the first, over servers times blocks.

    A chain may enter and leave a server at any block that the server holds.
    """
    servers = sorted(view.servers, key=lambda server: server.peer_id)
    starts = np.array([server.span.start for server in servers], int)
    ends = np.array([server.span.end for server in servers], int)
    half_rtt = np.array([costs.rtt_s(server) for server in servers]) / 2
    visit = np.array([costs.visit_s(server) for server in servers], float)
    per_block = np.array([costs.block_s(server) for server in servers], float)
    links = _links(servers, starts, ends, half_rtt) if costs.pushes else _NO_LINKS
    through = half_rtt  # time from here to the end if this server has computed the block before
    onward: dict[int, np.ndarray] = {}  # the server of each block, by the server of the block before
    stay = np.arange(len(servers))
    for block in reversed(range(blocks.start, blocks.end)):
        holds = (starts <= block) & (block < ends)
        if not holds.any():
            raise no_route(view, blocks)
        computed = np.where(holds, per_block + through, inf)  # time from this block on, without its server's visit
        entered = computed + visit
        first = int((entered + half_rtt).argmin())
        leaving = entered[first] + half_rtt[first] + half_rtt  # the way through the client, or an equally long one
        to = np.full(len(servers), first)
        used = np.flatnonzero((links.lowest <= block) & (block < links.highest))
        since, linked = links.since[used], links.half_rtt[used] + entered[links.to[used]]
        np.minimum.at(leaving, since, linked)
        shortest = linked == leaving[since]
        to[since[shortest]] = links.to[used][shortest]
        onward[block] = np.where(computed <= leaving, stay, to)
        through = np.minimum(computed, leaving)
    return _as_chain(servers, blocks, first, onward)


@dataclass(frozen=True)
class _Links:
    """A table of server pairs whose one-way time is known and shorter than the way through the client.

    A chain may switch from the first server to the second before the blocks ``lowest`` to ``highest - 1``.
    """

    since: np.ndarray
    to: np.ndarray
    half_rtt: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray


_NO_LINKS = _Links(*(np.zeros(0, int),) * 2, np.zeros(0), *(np.zeros(0, int),) * 2)


def _links(servers: Sequence[ServerRecord], starts: np.ndarray, ends: np.ndarray, half_rtt: np.ndarray) -> _Links:
    numbers = {server.peer_id: number for number, server in enumerate(servers)}
    measured = [
        (number, other, rtt_s)
        for number, server in enumerate(servers)
        for peer_id, rtt_s in server.next_hop_rtts_s.items()
        if (other := numbers.get(peer_id)) is not None
    ]
    left, right, rtt = np.array(measured, float).reshape(-1, 3).T
    since, to = np.concatenate([left, right]).astype(int), np.concatenate([right, left]).astype(int)
    lowest, highest = np.maximum(starts[since] + 1, starts[to]), np.minimum(ends[since] + 1, ends[to])
    half = np.concatenate([rtt, rtt]) / 2
    use = (lowest < highest) & (half < half_rtt[since] + half_rtt[to])
    return _Links(since[use], to[use], half[use], lowest[use], highest[use])


def _as_chain(servers: Sequence[ServerRecord], blocks: Span, first: int, onward: Mapping[int, np.ndarray]) -> Route:
    chain, number, start = [], first, blocks.start
    for block in range(blocks.start + 1, blocks.end):
        following = int(onward[block][number])
        if following != number:
            chain.append(Hop(servers[number], Span(start, block)))
            number, start = following, block
    return (*chain, Hop(servers[number], Span(start, blocks.end)))


def _as_in(view: SwarmView, chain: Route) -> Route:
    """Return the same chain with the servers' current records; empty if one is gone or holds other blocks."""
    servers = {server.peer_id: server for server in view.servers}
    found = []
    for hop in chain:
        server = servers.get(hop.server.peer_id)
        if server is None or not server.span.covers(hop.span):
            return ()
        found.append(Hop(server, hop.span))
    return tuple(found)


def best_replica(view: SwarmView, span: Span, costs: Costs) -> ServerRecord | None:
    """Return the server that carries one token through all of ``span`` soonest; None if no server holds all of it."""
    replicas = [server for server in view.servers if server.span.covers(span)]
    return min(replicas, key=lambda server: (seconds((Hop(server, span),), costs), server.peer_id), default=None)


@dataclass(frozen=True)
class Wanted:
    """A client's conditions on the servers that it uses.

    Attributes:
        allowed, blocked: peer ids or their ends; if ``allowed`` is not empty, only these servers are used.
        adapter: the adapter that a server must have loaded at its start; empty if any server will do.
        joins: whether a server must be able to let positions attend to later ones, as pictures in some models need.
    """

    revision: str
    num_blocks: int
    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    adapter: str = ""
    joins: bool = False

    @property
    def by_name(self) -> bool:
        return bool(self.allowed or self.blocked or self.adapter)

    def admits(self, peer_id: str) -> bool:
        return not peer_id.endswith(self.blocked) and (not self.allowed or peer_id.endswith(self.allowed))


def usable(
    view: SwarmView, wanted: Wanted, banned: Mapping[str, str] | None = None, time_s: float = 0.0
) -> tuple[SwarmView, Sequence[str]]:
    """Return the usable servers, and a phrase for each reason to leave servers out, with their number.

    Args:
        banned: servers that failed, by peer id, with the end of a phrase that gives the reason.
    """
    kept: list[ServerRecord] = []
    reasons: dict[str, int] = {}
    for server in view.servers:
        reason = _unusable(server, wanted, banned or {}, time_s)
        if reason is None:
            kept.append(server)
        else:
            reasons[reason] = reasons.get(reason, 0) + 1
    phrases = [f"{count} {'server' if count == 1 else 'servers'} {reason}" for reason, count in reasons.items()]
    return SwarmView(tuple(kept)), phrases


def no_route(view: SwarmView, blocks: Span, left_out: Sequence[str] = ()) -> NoRoute:
    """Return the error that names those of ``blocks`` that no server of the view holds."""
    replicas = view.replicas(blocks.end)
    # Blocks before the span count as held, so that the runs have the numbers of blocks.
    missing = runs_without([1] * blocks.start + replicas[blocks.start :])
    names = ", ".join(str(span) for span in missing)
    notes = f" (left out: {'; '.join(left_out)})" if left_out else ""
    return NoRoute(f"no server holds blocks {names}{notes}", missing)


def unknown_names(view: SwarmView, wanted: Wanted) -> list[str]:
    """Return sentences about named peers that are not in the view.

    Raises:
        NoRoute: there are servers, but none is allowed or has the adapter; the message lists what there is.
    """
    kind = wanted.revision, wanted.num_blocks, WIRE_VERSION
    servers = [s for s in view.servers if (s.revision, s.num_blocks, s.wire_version) == kind]
    if not servers:  # servers may still come
        return []
    more = f" and {len(servers) - _MAX_LISTED} more" if len(servers) > _MAX_LISTED else ""
    there_are = "there are " + ", ".join(f"{s.short_id} (blocks {s.span})" for s in servers[:_MAX_LISTED]) + more
    unknown = [
        name
        for name in (*wanted.allowed, *wanted.blocked)
        if not any(server.peer_id.endswith(name) for server in servers)
    ]
    _require_admitted(servers, wanted, there_are)
    return [f"no server here is {name}: {there_are}" for name in unknown]


def _require_admitted(servers: Sequence[ServerRecord], wanted: Wanted, there_are: str) -> None:
    """Raise NoRoute if none of the servers may be used, or none of those that may has the adapter."""
    admitted = [server for server in servers if wanted.admits(server.peer_id)]
    if not admitted:
        who = f"no server here is {' or '.join(wanted.allowed)}" if wanted.allowed else "all servers here are blocked"
        raise NoRoute(f"{who}: {there_are}")
    if wanted.adapter and not any(wanted.adapter in server.adapters for server in admitted):
        adapters = sorted({name for server in admitted for name in server.adapters})[:_MAX_LISTED]
        raise NoRoute(f"no server has adapter {wanted.adapter!r}: they have {', '.join(adapters) or 'none'}")


def _unusable(server: ServerRecord, wanted: Wanted, banned: Mapping[str, str], time_s: float) -> str | None:
    if server.wire_version != WIRE_VERSION:
        return f"of wire version {server.wire_version} where this client speaks {WIRE_VERSION}"
    if server.revision != wanted.revision or server.num_blocks != wanted.num_blocks:
        return f"with model revision {server.revision} where this client has {wanted.revision}"
    if server.state is not ServerState.ONLINE:
        return f"still {server.state.name.lower()}"
    if server.expires_at < time_s:
        return "not heard from recently"
    if not wanted.admits(server.peer_id):
        return "that this client is configured not to use"
    if wanted.adapter and wanted.adapter not in server.adapters:
        return f"without adapter {wanted.adapter}"
    if wanted.joins and not server.joins:
        return "of an older version, which computes causal attention to this model's pictures"
    return banned.get(server.peer_id)
