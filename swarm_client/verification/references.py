"""Who computes a server's blocks again. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm_client.routing.routing import Hop, Route
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import Kind


@dataclass(frozen=True)
class Part:
    """One hop of a chain, and who computes its blocks again; None: nobody else has them all."""

    hop: Hop
    others: Route | None

    @property
    def route(self) -> Route:
        """Others, or the server itself where there are none: its part of the chain is not checked then."""
        return self.others or (self.hop,)


def kind_of(server: ServerRecord) -> Kind:
    return Kind(*server.kind)


def references(servers: Sequence[ServerRecord], hops: Route, chance: random.Random) -> list[Part]:
    """For every hop of a chain, others that compute its blocks: servers outside the chain if there are such.

    ``servers``: those that may be used at present.
    """
    chain = {hop.server.peer_id for hop in hops}
    parts = []
    for hop in hops:
        outside = others(servers, hop, chain, chance)
        parts.append(Part(hop, outside or others(servers, hop, {hop.server.peer_id}, chance)))
    return parts


def others(servers: Sequence[ServerRecord], hop: Hop, avoid: Collection[str], chance: random.Random) -> Route | None:
    """A chain over the hop's blocks; None if there is none without the servers to ``avoid``.

    Those that round as the hop's server does come first, then those with most of the blocks that are left; among
    equals chance decides, so that nobody knows who checks whom.
    """
    kind, block, route = kind_of(hop.server), hop.span.start, []
    while block < hop.span.end:
        able = [server for server in servers if block in server.span and server.peer_id not in avoid]
        if not able:
            return None

        def merit(server: ServerRecord) -> tuple[bool, int, float]:
            return kind_of(server) == kind, min(server.span.end, hop.span.end), chance.random()

        server = max(able, key=merit)
        route.append(Hop(server, Span(block, min(server.span.end, hop.span.end))))
        block = route[-1].span.end
    return tuple(route)
