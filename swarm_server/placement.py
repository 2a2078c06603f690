"""Which blocks a server should host. Pure: a function of what the swarm looks like."""

from __future__ import annotations

from swarm_protocol.records import ServerState, SwarmView
from swarm_protocol.span import Span


def choose_span(view: SwarmView, num_blocks: int, num_hosted: int) -> Span:
    """The window of ``num_hosted`` blocks where the swarm is weakest.

    A window's weakness is the sorted list of its blocks' throughputs (tokens/s summed over the servers that hold
    them); the lexicographically lowest wins, the earliest of equals. Servers still joining count as well, those that
    leave do not.
    """
    throughputs = [0.0] * num_blocks
    for server in view.servers:
        if server.state is ServerState.DRAINING:
            continue
        for block in range(server.span.start, min(server.span.end, num_blocks)):
            throughputs[block] += max(server.tokens_per_s, 1e-6)
    num_hosted = min(num_hosted, num_blocks)
    starts = range(num_blocks - num_hosted + 1)
    start = min(starts, key=lambda first: sorted(throughputs[first : first + num_hosted]))
    return Span(start, start + num_hosted)
