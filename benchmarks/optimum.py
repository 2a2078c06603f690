"""What the simulation takes for granted, checked: throughput by linear programs, the optimum by search, and routes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix, vstack

from swarm_client.routing.routing import Costs, spread
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.span import Span
from swarm_server.placement.capacity import Coverage


def throughput_by_linear_program(layout: Coverage) -> float:
    """What ``Coverage.balance`` says, without its formula: servers share their speed among the blocks they hold."""
    blocks = np.concatenate([np.arange(layout.starts[i], layout.ends[i]) for i in range(len(layout.speeds))])
    servers = np.repeat(np.arange(len(layout.speeds)), layout.lengths)
    shares, num_servers = len(blocks), len(layout.speeds)
    variables = np.arange(shares)
    # The last variable is the throughput: each block gets at least as much.
    at_most_speed = coo_matrix((np.ones(shares), (servers, variables)), (num_servers, shares + 1))
    rows = np.concatenate([blocks, np.arange(layout.num_blocks)])
    columns = np.concatenate([variables, np.full(layout.num_blocks, shares)])
    signs = np.concatenate([-np.ones(shares), np.ones(layout.num_blocks)])
    enough = coo_matrix((signs, (rows, columns)), (layout.num_blocks, shares + 1))
    matrix = vstack([at_most_speed, enough]).tocsr()
    limits = np.concatenate([layout.speeds, np.zeros(layout.num_blocks)])
    result = linprog(-np.eye(1, shares + 1, shares)[0], A_ub=matrix, b_ub=limits, method="highs")
    assert result.success, result.message
    return float(-result.fun)


def exact_optimum(there: Coverage) -> float:
    """What no assignment of these servers exceeds, by search; of equal servers only once."""
    return _exact_optimum(
        there.num_blocks, tuple(sorted(zip(there.lengths.tolist(), there.speeds.tolist(), strict=True)))
    )


@cache
def _exact_optimum(num_blocks: int, servers: tuple[tuple[int, float], ...]) -> float:
    lengths, speeds = (np.array(values) for values in zip(*servers, strict=True))
    layout = Coverage(num_blocks, (), np.zeros(len(servers), int), lengths, speeds, np.ones(len(servers), bool))
    _, proved = best_assignment(layout, time_limit_s=5.0)
    return proved


def best_assignment(there: Coverage, time_limit_s: float) -> tuple[float, float]:
    """The most that servers of these lengths and speeds carry, wherever they are put, by branch and bound.

    Returns: the best that was found, and what was proved that nothing exceeds: the same unless time ran out.
    """
    num_blocks, num_servers = there.num_blocks, len(there.speeds)
    windows = [
        (server, start) for server in range(num_servers) for start in range(num_blocks - there.lengths[server] + 1)
    ]
    shares = num_servers * num_blocks
    size = len(windows) + shares + 1  # which window; speed of each server to each block; throughput
    bound = there.upper_bound()
    rows, columns, values, lows, highs = [], [], [], [], []

    def constrain(terms: list[tuple[int, float]], low: float, high: float) -> None:
        rows.extend([len(lows)] * len(terms))
        columns.extend(column for column, _ in terms)
        values.extend(value for _, value in terms)
        lows.append(low)
        highs.append(high)

    def share(server: int, block: int) -> int:
        return len(windows) + server * num_blocks + block

    for server in range(num_servers):
        own = [(column, start) for column, (owner, start) in enumerate(windows) if owner == server]
        constrain([(column, 1) for column, _ in own], 1, 1)
        constrain([(share(server, block), 1) for block in range(num_blocks)], 0, there.speeds[server] / bound)
        for block in range(num_blocks):
            # No block needs more from one server than all that passes.
            most = min(1.0, there.speeds[server] / bound)
            holding = [(column, -most) for column, start in own if start <= block < start + there.lengths[server]]
            constrain([(share(server, block), 1), *holding], -np.inf, 0)
    for block in range(num_blocks):
        constrain([(size - 1, -1), *((share(server, block), 1) for server in range(num_servers))], 0, np.inf)
    result = milp(
        -np.eye(1, size, size - 1)[0],
        constraints=LinearConstraint(coo_matrix((values, (rows, columns)), (len(lows), size)).tocsr(), lows, highs),
        integrality=np.arange(size) < len(windows),
        bounds=Bounds(0, 1),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.005},
    )
    found = 0.0 if result.x is None else -result.fun
    return float(found * bound), float(min(1.0, -result.mip_dual_bound) * bound)


@dataclass(frozen=True)
class Routed:
    """Tokens per second of micro-batches on real routes.

    Attributes:
        stream: while they keep coming: the server with most work sets the pace.
        alone: of a fixed number that all start at once, until the last is through: filling and emptying chains counts.
    """

    stream: float
    alone: float


def routed(view: SwarmView, num_blocks: int, batches_each: int = 50, num_tokens: int = 64) -> Routed:
    """On the chains that ``spread`` gives ``batches_each`` micro-batches for each replica of the model.

    Servers compute them in the order in which they arrive; the network takes no time.
    """
    replicas = sum(len(server.span) for server in view.servers) / num_blocks
    sizes = [num_tokens] * round(batches_each * max(1.0, replicas))
    chains = spread(view, Span(0, num_blocks), sizes, Costs({}))
    free_at: dict[str, float] = defaultdict(float)
    busy_s: dict[str, float] = defaultdict(float)
    arrivals = [(0.0, number, 0) for number in range(len(chains))]  # when, which micro-batch, at which of its hops
    last = 0.0
    while arrivals:
        time, number, index = heappop(arrivals)
        server, span = chains[number][index].server, chains[number][index].span
        work_s = num_tokens * len(span) / (server.forward_tokens_per_s * len(server.span))
        busy_s[server.peer_id] += work_s
        free_at[server.peer_id] = out = max(time, free_at[server.peer_id]) + work_s
        last = max(last, out)
        if index + 1 < len(chains[number]):
            heappush(arrivals, (out, number, index + 1))
    num_all = num_tokens * len(chains)
    return Routed(num_all / max(busy_s.values()), num_all / last)
