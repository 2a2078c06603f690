"""The load that a client's own sessions put on servers, which the DHT's records show only half a minute later. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm_client.routing.routing import PROMPT_CHUNK, SESSION_PRICE, Costs, Route
from swarm_protocol.dht.records import SwarmView


@dataclass(frozen=True)
class SessionLoad:
    """The load of one session.

    Attributes:
        route: the hops that the session has, and the servers that are being asked for room.
        num_waiting: the number of positions, in all rows, that were sent and are not answered yet.
    """

    route: Route
    num_waiting: int


def with_own_load(costs: Costs, view: SwarmView, loads: Iterable[SessionLoad]) -> Costs:
    """Return the costs of one more session beside these loads.

    Sessions that decode together share the reading of weights, so each one raises the price of computing only by
    ``SESSION_PRICE``. Prompts are computed one after the other.
    """
    num_sessions: Counter[str] = Counter()
    num_waiting: Counter[str] = Counter()
    for load in loads:
        for hop in load.route:
            num_sessions[hop.server.peer_id] += 1
            num_waiting[hop.server.peer_id] += load.num_waiting * len(hop.span)
    prompts = replace(costs, num_tokens=PROMPT_CHUNK)
    queues_s = {
        server.peer_id: num_waiting[server.peer_id] * prompts.block_s(server) / PROMPT_CHUNK
        for server in view.servers
        if num_waiting[server.peer_id]
    }
    prices = {peer_id: 1 + SESSION_PRICE * num for peer_id, num in num_sessions.items()}
    return replace(costs, prices=prices, queues_s=queues_s)
