"""The choice of the servers that compute a server's blocks again. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from swarm_client.routing.routing import Hop, Route
from swarm_protocol.dht.claims import hosts_of
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import RoundingKind

_INDEPENDENT = 0.25  # the share of choices in which another address counts more than the same rounding


@dataclass(frozen=True)
class CheckedHop:
    """One hop of a chain, and other servers that compute its blocks again; None if no others hold all of the blocks."""

    hop: Hop
    others: Route | None

    @property
    def route(self) -> Route:
        """Return the other servers, or the hop itself if there are none: this part of the chain is then unchecked."""
        return self.others or (self.hop,)


def kind_of(server: ServerRecord) -> RoundingKind:
    return RoundingKind(*server.kind)


def references(servers: Sequence[ServerRecord], hops: Route, chance: random.Random) -> list[CheckedHop]:
    """Return other servers of the blocks of every hop of a chain, from outside the chain if possible.

    ``servers``: the servers that may be used now.
    """
    chain = {hop.server.peer_id for hop in hops}
    parts = []
    for hop in hops:
        outside = others(servers, hop, chain, chance)
        parts.append(CheckedHop(hop, outside or others(servers, hop, {hop.server.peer_id}, chance)))
    return parts


def others(
    servers: Sequence[ServerRecord],
    hop: Hop,
    avoid: Collection[str],
    chance: random.Random,
    judged: Collection[str] = (),
) -> Route | None:
    """Return a chain over the hop's blocks; None if there is none without the servers to ``avoid``.

    Servers that round as the hop's server does can be compared most exactly. Servers at other public addresses are less
    likely to belong to the owner of the judged servers: the hop's server and those in ``judged``. Mostly, equal
    rounding counts more. The address counts more in a share ``_INDEPENDENT`` of choices: otherwise an owner could
    escape by announcing a kind that only its own servers have. Among servers that are equal in both, those with most of
    the remaining blocks come first. Then chance decides, so that the choice of the checking server is unpredictable.
    """
    kind, block, route = kind_of(hop.server), hop.span.start, []
    hosts = hosts_of(hop.server).union(*(hosts_of(server) for server in servers if server.peer_id in judged))
    prefers_hosts = chance.random() < _INDEPENDENT
    while block < hop.span.end:
        able = [server for server in servers if block in server.span and server.peer_id not in avoid]
        if not able:
            return None

        def merit(server: ServerRecord) -> tuple[tuple[bool, bool], int, float]:
            fit = _fit(server, kind, hosts, prefers_hosts)
            return fit, min(server.span.end, hop.span.end), chance.random()

        server = max(able, key=merit)
        route.append(Hop(server, Span(block, min(server.span.end, hop.span.end))))
        block = route[-1].span.end
    return tuple(route)


def witnesses(
    servers: Iterable[ServerRecord], kind: RoundingKind, judged: Iterable[ServerRecord], chance: random.Random
) -> Iterator[ServerRecord]:
    """Yield servers, each of which has all blocks in question, in the order in which to ask them.

    Each is chosen as ``others`` chooses: by its kind and its address, and the address counts among those of the
    ``judged`` servers and of the witnesses before it.
    """
    left, hosts = list(servers), frozenset[str]().union(*(hosts_of(server) for server in judged))
    while left:
        prefers_hosts = chance.random() < _INDEPENDENT
        merits = [(_fit(server, kind, hosts, prefers_hosts), chance.random()) for server in left]
        witness = left.pop(merits.index(max(merits)))
        hosts |= hosts_of(witness)
        yield witness


def _fit(server: ServerRecord, kind: RoundingKind, hosts: frozenset[str], prefers_hosts: bool) -> tuple[bool, bool]:
    """Return whether the server rounds as ``kind``, and whether it is at none of ``hosts``; what counts more first."""
    is_alike, is_apart = kind_of(server) == kind, not hosts & hosts_of(server)
    return (is_apart, is_alike) if prefers_hosts else (is_alike, is_apart)
