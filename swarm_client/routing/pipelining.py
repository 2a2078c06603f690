"""Into how many parts the rows of a batch are divided, each in a session of its own. Pure.

With one session, one server computes while the others of the chain wait. In parts that follow one another, as the
micro-batches of GPipe do (Huang et al., 2019), all of them compute at once, and links carry one part while servers
compute others. But each part costs a server what a step takes whatever its rows are: reading the weights, above all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swarm_client.routing.routing import Costs, Hop, Route

_LEAST_ROWS = 16  # of a part
_MOST_PARTS = 8
_WORTH = 0.9  # of the time of one part: what is hardly sooner is not worth the messages
_MESSAGE_S = 0.002  # what a message takes a server
_MANY = 64  # positions with which servers measure what one of many takes


@dataclass(frozen=True)
class Stage:
    """A server or a link, which takes ``fixed_s`` for a step, and ``row_s`` more for each of its rows."""

    fixed_s: float
    row_s: float

    def seconds(self, num_rows: float) -> float:
        return self.fixed_s + num_rows * self.row_s


def step_s(stages: Iterable[Stage], num_rows: int, num_parts: int) -> float:
    """What a step takes: the first part through all stages, and the others behind it through the slowest."""
    each_s = [stage.seconds(num_rows / num_parts) for stage in stages]
    return sum(each_s) + (num_parts - 1) * max(each_s)


def most_parts(num_rows: int, unit: int = 1) -> int:
    """``unit``: rows that stay together."""
    return max(1, min(_MOST_PARTS, num_rows // _LEAST_ROWS, num_rows // unit))


def num_parts(servers: Sequence[Stage], links: Sequence[Stage], num_rows: int, unit: int = 1) -> int:
    """With which a step is soonest through; one if nobody knows."""
    if not servers:
        return 1
    stages = [*servers, *links]
    best = min(range(1, most_parts(num_rows, unit) + 1), key=lambda number: step_s(stages, num_rows, number))
    return best if step_s(stages, num_rows, best) < _WORTH * step_s(stages, num_rows, 1) else 1


def divided(num_rows: int, number: int, unit: int = 1) -> list[slice]:
    """The rows of each part, as many in each as can be."""
    units = num_rows // unit
    ends = [unit * (units * part // number) for part in range(number)] + [num_rows]
    return [slice(start, end) for start, end in pairwise(ends)]


def servers_of(chain: Route, costs: Costs) -> list[Stage]:
    """Its servers; none if one of them does not say how fast it computes many rows."""
    return [] if not all(_is_known(hop) for hop in chain) else [_server(hop, costs) for hop in chain]


def _is_known(hop: Hop) -> bool:
    return hop.server.tokens_per_s > 0 and hop.server.forward_tokens_per_s > 0


def _server(hop: Hop, costs: Costs) -> Stage:
    alone_s = replace(costs, num_tokens=1).block_s(hop.server)
    row_s = replace(costs, num_tokens=_MANY).block_s(hop.server) / _MANY
    return Stage(_MESSAGE_S + len(hop.span) * max(0.0, alone_s - row_s), len(hop.span) * row_s)
