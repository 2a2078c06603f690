"""How the rows of a batch are divided among lanes, each a session on a chain of its own. Pure.

With one session, one server computes while the others of its chain wait. Lanes follow one another, as the micro-batches
of GPipe do (Huang et al., 2019), so that all servers compute at once and links carry some rows while servers compute
others; and they take different replicas, if there are some. But each lane costs a server what a step takes whatever its
rows are: reading the weights, above all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swarm_client.routing.routing import Costs, Hop, Route, spread
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.span import Span

_LEAST_ROWS = 16  # of a lane
_MOST_LANES = 8
_WORTH = 0.9  # of the time of one lane: what is hardly sooner is not worth the messages
_MESSAGE_S = 0.002  # what a message takes a server
_MANY = 64  # positions with which servers measure what one of many takes


@dataclass(frozen=True)
class Stage:
    """A server or a link, which takes ``fixed_s`` for a step, and ``row_s`` more for each of its rows."""

    fixed_s: float
    row_s: float

    def seconds(self, num_rows: float) -> float:
        return self.fixed_s + num_rows * self.row_s


Stages = Mapping[str, Stage]  # of one lane, by the names of servers and links
StagesOf = Callable[[Route], Stages]


def step_s(lanes: Sequence[Stages], sizes: Sequence[int]) -> float:
    """What a step of so many rows in each lane takes.

    A lane has to go through its stages, and through the busiest of them behind all others that come there. That is
    exact for equal lanes on one chain, and a guess for others.
    """
    busy_s: dict[str, float] = defaultdict(float)
    for stages, size in zip(lanes, sizes, strict=True):
        for name, stage in stages.items():
            busy_s[name] += stage.seconds(size)
    return max(
        sum(stage.seconds(size) for stage in stages.values())
        + max(busy_s[name] - stage.seconds(size) for name, stage in stages.items())
        for stages, size in zip(lanes, sizes, strict=True)
    )


def most_lanes(num_rows: int, unit: int = 1) -> int:
    """``unit``: so many rows stay together."""
    return max(1, min(_MOST_LANES, num_rows // _LEAST_ROWS, num_rows // unit))


def divided(num_rows: int, number: int, unit: int = 1) -> list[slice]:
    """The rows of each lane, as equally many as can be."""
    units = num_rows // unit
    ends = [unit * (units * lane // number) for lane in range(number)] + [num_rows]
    return [slice(start, end) for start, end in pairwise(ends)]


def chains_of_lanes(
    view: SwarmView, blocks: Span, num_rows: int, unit: int, costs: Costs, links: StagesOf
) -> list[Route]:
    """A chain for each lane, with which a step is soonest through; one if that is best, or if nobody knows.

    ``view`` holds usable servers only; ``links``: between the servers of a chain, and the client.

    Raises:
        NoRoute: naming the blocks that no server holds.
    """
    found: list[tuple[float, list[Route]]] = []
    for number in range(1, most_lanes(num_rows, unit) + 1):
        sizes = [rows.stop - rows.start for rows in divided(num_rows, number, unit)]
        chains = spread(view, blocks, sizes, replace(costs, need_tokens=costs.need_tokens // number))
        if not all(_is_known(hop) for chain in chains for hop in chain):
            break
        lanes = [{**_servers(chain, costs), **links(chain)} for chain in chains]
        found.append((step_s(lanes, sizes), chains))
    if not found:
        return spread(view, blocks, [num_rows], costs)
    best_s, best = min(found, key=lambda each: each[0])
    return best if best_s < _WORTH * found[0][0] else found[0][1]


def _is_known(hop: Hop) -> bool:
    return hop.server.tokens_per_s > 0 and hop.server.forward_tokens_per_s > 0


def _servers(chain: Route, costs: Costs) -> Stages:
    return {hop.server.peer_id: _server(hop, costs) for hop in chain}


def _server(hop: Hop, costs: Costs) -> Stage:
    alone_s = replace(costs, num_tokens=1).block_s(hop.server)
    row_s = replace(costs, num_tokens=_MANY).block_s(hop.server) / _MANY
    return Stage(_MESSAGE_S + len(hop.span) * max(0.0, alone_s - row_s), len(hop.span) * row_s)
