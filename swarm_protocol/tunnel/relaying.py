"""A relay: it opens tunnels to servers that keep a stream open to it, and copies the encrypted (TLS) bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.tokens import Role
from swarm_protocol.errors import AccessDenied, PeerBusy, PeerError, SwarmError
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import read_message, write, write_message
from swarm_protocol.streams.limits import BandwidthBudget, Places
from swarm_protocol.streams.pipe import splice
from swarm_protocol.streams.streams import Stream, Streams
from swarm_protocol.tunnel.accepting import HELLO_TIMEOUT_S, TUNNEL
from swarm_protocol.tunnel.members import require_member
from swarm_protocol.wire.printable import printable

RELAY, RESERVE = "/swarm/relay/1", "/swarm/reserve/1"
_LATE = 3.0  # a server is gone after this many times its keepalive interval
_MAX_PAUSE_S = 300.0
_RESERVATIONS_OF_ONE = 2  # the previous one may not have ended yet
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RelayLimits:
    """The limits of one relay. ``bytes_per_s`` counts both directions of all tunnels together; 0: it does not relay."""

    bytes_per_s: float = inf
    servers: int = 64
    tunnels: int = 512
    tunnels_of_caller: int = 64  # to all servers


@dataclass
class Relay:
    """A relay for servers and callers over libp2p. ``may_relay``: whether peers can reach this member at present.

    When it stops offering to relay, each reservation ends with the server's next keepalive: servers look for another.
    """

    streams: Streams
    limits: RelayLimits
    access: AccessControl | None = None
    may_relay: Callable[[], bool] = lambda: True
    _servers: dict[str, Stream] = field(default_factory=dict, init=False)  # by peer id
    _tunnels: dict[Stream, str] = field(default_factory=dict, init=False)  # the server, by the stream to it

    def __post_init__(self) -> None:
        self.budget = BandwidthBudget(lambda: self.limits.bytes_per_s or inf)
        self._reservations = Places("servers behind this relay", self.limits.servers, _RESERVATIONS_OF_ONE)
        self._places = Places("tunnels through this relay", self.limits.tunnels, self.limits.tunnels_of_caller)

    @property
    def offers(self) -> bool:
        return self.limits.bytes_per_s > 0 and self.may_relay()

    async def start(self) -> None:
        await self.streams.serve(RESERVE, self._reserve)
        await self.streams.serve(RELAY, self._relay)

    async def _reserve(self, stream: Stream) -> None:
        request = await read_message(stream.reader, pb.Reserve, HELLO_TIMEOUT_S)
        try:
            self._require(Role.SERVER, request.member, stream)
            if stream.peer_id in self._servers:  # the server lost that connection, and asks again on a new one
                self._servers.pop(stream.peer_id).abort()
                self._cut(stream.peer_id)
                # libp2p could open tunnels on the dead connection. All are closed, and the server asks once more.
                await self.streams.disconnect(stream.peer_id)
                return
            with self._reservations.taken(stream.caller):
                await self._keep(stream, request.keepalive_s)
        except (AccessDenied, PeerError) as error:
            await write_message(stream.writer, pb.Reserved(refusal=str(error)))

    async def _keep(self, stream: Stream, keepalive_s: float) -> None:
        """Relay for a server as long as it sends keepalives."""
        self._servers[stream.peer_id] = stream
        _logger.info("relaying for server %s", printable(stream.peer_id[-6:]))
        try:
            await write_message(stream.writer, pb.Reserved(host=stream.host))
            pause_s = min(max(1.0, keepalive_s), _MAX_PAUSE_S)  # in this order, NaN from a server counts as 1 s
            while self.offers:
                async with asyncio.timeout(_LATE * pause_s):
                    sign = await stream.reader.read(1)
                if not sign:
                    break
                await write(stream.writer, sign)
        except TimeoutError:
            _logger.info("server %s is silent, no more is relayed for it", printable(stream.peer_id[-6:]))
            self._cut(stream.peer_id)
        finally:
            if self._servers.get(stream.peer_id) is stream:
                del self._servers[stream.peer_id]

    async def _relay(self, stream: Stream) -> None:
        request = await read_message(stream.reader, pb.Open, HELLO_TIMEOUT_S)
        try:
            self._require(Role.CLIENT, request.member, stream)
            if request.target not in self._servers:
                raise PeerBusy("this relay has no such server")
            with self._places.taken(stream.caller):
                server = await self.streams.open(request.target, TUNNEL)
                opening = pb.Open(
                    target=request.target, caller=stream.peer_id, caller_host=stream.host, port=request.port
                )
                self._tunnels[server] = request.target
                try:
                    await write_message(server.writer, opening)
                    await splice(stream, server, self.budget.take)
                finally:
                    del self._tunnels[server]
        except SwarmError as error:
            await write_message(stream.writer, pb.Opened(refusal=str(error)))

    def _cut(self, peer_id: str) -> None:
        """End the tunnels to a server, so that callers notice at once."""
        for tunnel, server in self._tunnels.items():
            if server == peer_id:
                tunnel.abort()

    def _require(self, role: Role, member: pb.Member, stream: Stream) -> None:
        if not self.offers:
            raise PeerBusy("this member does not relay")
        require_member(self.access, role, member, stream.peer_id, self.streams.peer_id)
