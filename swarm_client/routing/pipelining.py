"""The division of a batch's rows among lanes, each of which is a session on a chain of its own. Pure.

A single session keeps one server busy while the others of its chain wait. Lanes follow one another like the
micro-batches of GPipe (Huang et al., 2019). All servers then compute at once, and links carry some rows while servers
compute others. Lanes also use different replicas, if there are some. However, each lane costs a server the fixed
part of a step, which is mostly the reading of the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swarm_client.routing.routing import Costs, Hop, Route, spread
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.span import Span

_LEAST_ROWS = 16  # the fewest rows of a lane
_MOST_LANES = 8
_WORTH = 0.9  # more lanes must take less than this share of one lane's time, because they cost messages
_MESSAGE_S = 0.002  # a server's time for one message, besides computing
_MANY = 64  # the batch size at which servers measure the time per position


@dataclass(frozen=True)
class PipelineStage:
    """A server or a link that takes ``fixed_s`` for a step, and ``row_s`` more for each of its rows."""

    fixed_s: float
    row_s: float

    def seconds(self, num_rows: float) -> float:
        return self.fixed_s + num_rows * self.row_s


Stages = Mapping[str, PipelineStage]  # the stages of one lane, by the names of servers and links
StagesOf = Callable[[Route], Stages]


def step_s(lanes: Sequence[Stages], sizes: Sequence[int]) -> float:
    """Return the seconds for a step with so many rows in each lane.

    A lane passes through all its stages, and at the busiest one it waits for all other lanes that use it. The result is
    exact for equal lanes on one chain, and an estimate for other cases.
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
    """Return the most lanes for these rows. ``unit``: the number of rows that stay together."""
    return max(1, min(_MOST_LANES, num_rows // _LEAST_ROWS, num_rows // unit))


def divided(num_rows: int, number: int, unit: int = 1) -> list[slice]:
    """Return the rows of each lane, divided as equally as possible."""
    units = num_rows // unit
    ends = [unit * (units * lane // number) for lane in range(number)] + [num_rows]
    return [slice(start, end) for start, end in pairwise(ends)]


def chains_of_lanes(
    view: SwarmView, blocks: Span, num_rows: int, unit: int, costs: Costs, links: StagesOf
) -> list[Route]:
    """Return the lanes' chains with which a step ends soonest: one chain if that is best, or if speeds are unknown.

    ``view`` holds usable servers only; ``links`` returns the stages between the servers of a chain and the client.

    Raises:
        NoRoute: no server holds some blocks; the message names them.
    """
    found: list[tuple[float, list[Route]]] = []
    for number in range(1, most_lanes(num_rows, unit) + 1):
        sizes = [rows.stop - rows.start for rows in divided(num_rows, number, unit)]
        chains = spread(view, blocks, sizes, replace(costs, need_tokens=costs.need_tokens // number))
        if not all(_is_known(hop) for chain in chains for hop in chain):  # without speeds, more lanes are a guess
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


def _server(hop: Hop, costs: Costs) -> PipelineStage:
    # A line through two measured points, one row and many rows, gives the fixed part of a step and that of each row.
    alone_s = replace(costs, num_tokens=1).block_s(hop.server)
    row_s = replace(costs, num_tokens=_MANY).block_s(hop.server) / _MANY
    return PipelineStage(_MESSAGE_S + len(hop.span) * max(0.0, alone_s - row_s), len(hop.span) * row_s)
