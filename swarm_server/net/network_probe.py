"""Measurement of the network between this server and other servers of the swarm; strangers are never contacted."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import grpc

from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import BadReply, PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import WIRE_VERSION
from swarm_server.net.push import ChannelPool

MAX_ANNOUNCED = 8  # round-trip times; the shortest are announced
_MAX_ASKED = 16  # servers per round
_MAX_COMPARED = 2  # servers compared with the nearest; each takes a connection, perhaps through a relay
_TIMEOUT_S = 3.0
_FIRST_ECHO_BYTES, _MOST_ECHO_BYTES = 16 * 1024, 256 * 1024
_ECHO_TIMEOUT_S = 10.0
_ECHOES = 2  # of each size
_SHORTEST_OF = 8  # round trips
_QUICK_S = 0.1  # sending a payload must take longer than round trips vary
_LEAST_S = 1e-5  # of a payload that seems to take no time
_MAX_ECHOES = 2  # servers whose bandwidth is measured
_ECHO_EVERY = 10  # rounds between two measurements of the bandwidth
_WORTH_ANNOUNCING = 0.25  # relative: a smaller change is noise, which must not make servers move
_FEW_REPLICAS = 2  # a block with no more servers than this is critical; its servers are checked first
_MAX_VERIFIED = 32  # servers checked at a time


@dataclass(frozen=True)
class MeasuredLink:
    """The way to another server.

    Attributes:
        rtt_s: the shortest of several round-trip times.
        bytes_per_s: the bandwidth of the slower direction.
    """

    rtt_s: float
    bytes_per_s: float


class NetworkProbe:
    """The round-trip times to servers that may come next in a chain, and the bandwidth to other servers.

    Attributes:
        rtts_s: the round-trip times to the nearest servers that answered in the last round, by peer id.
        bytes_per_s: the bandwidth of the slower direction to the best server measured; 0 before the first measurement.
    """

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels
        self._chance = random.Random()
        self._num_rounds = 0
        self._silent: dict[str, float] = {}  # the expiry times of silent servers' records, by peer id
        self.rtts_s: dict[str, float] = {}
        self.bytes_per_s = 0.0

    async def measure(self, view: SwarmView, own: ServerRecord) -> None:
        """Measure one round: the nearest servers of the last round, and some others."""
        others = [server for server in view.servers if _can_be_asked(server, own)]
        nexts = {server.peer_id: server for server in others if may_follow(own, server)}
        known = [server for peer_id, server in nexts.items() if peer_id in self.rtts_s]
        fresh = [server for peer_id, server in nexts.items() if peer_id not in self.rtts_s]
        most = _MAX_COMPARED if len(known) == MAX_ANNOUNCED else _MAX_ASKED - len(known)
        asked = [*known, *self._chance.sample(fresh, min(len(fresh), most))]
        rtts_s = await asyncio.gather(*map(self._rtt_s, asked))
        answered = [(rtt_s, server) for rtt_s, server in zip(rtts_s, asked, strict=True) if rtt_s is not None]
        answered.sort(key=lambda answer: answer[0])
        self.rtts_s = {server.peer_id: rtt_s for rtt_s, server in answered[:MAX_ANNOUNCED]}
        if self._num_rounds % _ECHO_EVERY == 0 or not self.bytes_per_s:
            # The last server of a chain has no next ones, and then measures the way to any others.
            near = [server for _, server in answered] or self._chance.sample(others, min(len(others), _MAX_ECHOES))
            await self._measure_bytes(near[:_MAX_ECHOES])
        self._num_rounds += 1

    async def living(self, view: SwarmView, own: ServerRecord | None = None) -> SwarmView:
        """Return the view without servers that do not answer, because the records of dead servers persist for a while.

        Only some servers of a large swarm are checked, first those without which blocks may be missing. A silent server
        is left out until it has published another record.
        """
        replicas = view.replicas(max((server.num_blocks for server in view.servers), default=0))

        def is_critical(server: ServerRecord) -> bool:
            return min(replicas[server.span.start : server.span.end]) <= _FEW_REPLICAS

        present = [server for server in view.servers if server.expires_at > self._silent.get(server.peer_id, -inf)]
        others = [
            server
            for server in present
            if server.state is ServerState.ONLINE and (own is None or server.peer_id != own.peer_id)
        ]
        self._chance.shuffle(others)
        asked = sorted(others, key=is_critical, reverse=True)[:_MAX_VERIFIED]  # among equals, chance decides
        answers = await asyncio.gather(*map(self._rtt_s, asked))
        silent = {server.peer_id: server for server, rtt_s in zip(asked, answers, strict=True) if rtt_s is None}
        self._silent = {
            server.peer_id: server.expires_at
            for server in view.servers
            if server.peer_id in silent or server.expires_at <= self._silent.get(server.peer_id, -inf)
        }
        return SwarmView(tuple(server for server in present if server.peer_id not in silent))

    async def links(self, servers: Sequence[ServerRecord], most_rtt_s: float) -> dict[str, MeasuredLink]:
        """Return the links to the servers that answer within ``most_rtt_s``, by peer id; measured one by one."""
        found = {}
        for server in servers:
            rtts_s = [await self._rtt_s(server) for _ in range(_SHORTEST_OF)]
            rtt_s = inf if None in rtts_s else min(filter(None, rtts_s))
            if rtt_s <= most_rtt_s and (bytes_per_s := await self._bytes_per_s(server)):
                found[server.peer_id] = MeasuredLink(rtt_s, bytes_per_s)
        return found

    async def _rtt_s(self, server: ServerRecord) -> float | None:
        """Return the round-trip time, or None if the server does not answer."""
        rtt_s = await self._timed(server, pb.EchoRequest(), _TIMEOUT_S)
        return None if rtt_s == inf else rtt_s

    async def _measure_bytes(self, servers: Iterable[ServerRecord]) -> None:
        best = max([await self._bytes_per_s(server) for server in servers], default=0.0)
        if best and abs(best - self.bytes_per_s) > _WORTH_ANNOUNCING * self.bytes_per_s:
            self.bytes_per_s = best

    async def _bytes_per_s(self, server: ServerRecord) -> float:
        """Return the bandwidth of the slower direction in bytes per second, or 0 if the server does not answer.

        Each payload is sent twice, the first time to widen TCP's window. A larger one follows only if that is quick.
        Round trips are measured equally often: other traffic may delay one, and then bytes would seem to take no time.
        """
        rtt_s, size_bytes = inf, _FIRST_ECHO_BYTES
        while True:
            ways = pb.EchoRequest(payload=bytes(size_bytes)), pb.EchoRequest(reply_bytes=size_bytes)
            ways_s = [inf, inf]
            for _ in range(_ECHOES):
                pinged_s = await self._rtt_s(server)
                found_s = [await self._timed(server, way, _ECHO_TIMEOUT_S) for way in ways]
                if pinged_s is None or None in found_s:
                    return 0.0
                if inf in found_s:
                    return size_bytes / _ECHO_TIMEOUT_S
                rtt_s = min(rtt_s, pinged_s)
                ways_s = [min(way_s, new_s or inf) for way_s, new_s in zip(ways_s, found_s, strict=True)]
            send_s = max(ways_s) - rtt_s
            if send_s >= _QUICK_S or size_bytes >= _MOST_ECHO_BYTES:
                return size_bytes / max(_LEAST_S, send_s)
            size_bytes *= 4

    async def _timed(self, server: ServerRecord, request: pb.EchoRequest, timeout_s: float) -> float | None:
        """Return the time of an echo; a failure gives None, and no answer within ``timeout_s`` gives infinity."""
        try:
            stub = await self._channels.stub(server)
            start_s = time.perf_counter()
            await stub.Echo(request, timeout=timeout_s)
            return time.perf_counter() - start_s
        except (PeerUnavailable, BadReply):
            return None
        except grpc.RpcError as error:
            return inf if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else None


def may_follow(own: ServerRecord, server: ServerRecord) -> bool:
    """Return whether a chain may go from ``own`` directly to ``server``."""
    return own.span.start < server.span.end and server.span.start <= own.span.end < server.span.end


def _can_be_asked(server: ServerRecord, own: ServerRecord) -> bool:
    same = (server.revision, server.wire_version) == (own.revision, WIRE_VERSION)
    return same and server.peer_id != own.peer_id and server.state is ServerState.ONLINE
