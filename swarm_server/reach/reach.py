"""The upkeep of a server's reachability: its address, questions to other members, and relays if needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import inf

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.dht.addresses import connects, tcp_target
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import short_id
from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import logged_errors
from swarm_protocol.net.hivemind_parts import P2P
from swarm_protocol.net.hosts import host_port
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.process.local_registry import is_loopback
from swarm_protocol.streams.streams import DaemonStreams
from swarm_protocol.tunnel.accepting import Acceptor
from swarm_protocol.tunnel.circuit import Circuit
from swarm_protocol.tunnel.dial_back import ask_dial_back, ips_of, serve_dial_back
from swarm_protocol.tunnel.members import RelayCredentials
from swarm_protocol.tunnel.relaying import Relay, RelayLimits
from swarm_protocol.tunnel.reserving import RelayReservation, reserve
from swarm_server.core.config import ServerConfig
from swarm_server.reach.choosing import WANTED, best, candidates, is_unreachable, serves_others
from swarm_server.reach.own_addresses import ANY_HOSTS, LOOPBACK, OwnAddresses

_LOOK_S = 5.0  # between two checks of the own address and of missing relays
_ASK_EVERY_S = 60.0  # between two questions whether others reach this server
_AGAIN_S = 0.5  # pause after a relay was lost
_RESTART_S = 30.0  # time that another libp2p daemon may take to start
_MAX_ASKED = 3
_NO_DAEMON = (SwarmError, TimeoutError, OSError, ValueError, asyncio.IncompleteReadError)  # errors without a daemon
_logger = logging.getLogger(__name__)


class Reach:
    """The reachability that a server announces; it keeps relays, and may be a relay itself.

    Attributes:
        is_reachable: whether most other members reach this server directly, as far as is known.
        relay: the relay service for others, active while this server can be reached.
        origins: the sources of tunnel connections, see ``Acceptor``.
    """

    def __init__(
        self,
        config: ServerConfig,
        access: SwarmAccess,
        dht: Dht,
        streams: DaemonStreams,
        own: OwnAddresses,
        members: Callable[[], Sequence[str]],
    ) -> None:
        """Prepare the upkeep; ``members`` returns multiaddrs of initial peers and of other peers found before."""
        self._config, self._dht, self._streams, self._own = config, dht, streams, own
        self._membership = RelayCredentials(access.identity, access.token)
        self._members = members
        self._reservations: dict[str, RelayReservation] = {}  # by the relay's peer id
        self._failed: dict[str, float] = {}
        self._peer_address = ""  # of the libp2p daemon, for others
        self._takes_tunnels = False  # others reach the libp2p daemon but not gRPC, so that tunnels need no relay
        self._asked_s = -inf  # when others were last asked whether they reach this server
        self._wake, self._attached = asyncio.Event(), asyncio.Event()
        self.is_reachable = config.relay != "always" and dht.serves_others
        self._wants_relays = not self.is_reachable  # some members do not reach it
        self.origins: dict[tuple[str, int], str] = {}
        limits = RelayLimits(config.relay_bytes_per_s)
        self.relay = Relay(streams, limits, access.control, lambda: self.is_reachable)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the direct addresses, then circuits through relays."""
        circuits = [str(Circuit(held.relay, self._dht.peer_id)) for held in self._reservations.values()]
        if self._takes_tunnels:
            circuits.insert(0, str(Circuit(self._peer_address, self._dht.peer_id)))
        return (*self._own.direct(), *circuits)

    @property
    def relay_address(self) -> str:
        """Return the address at which this server relays for others, or "" if it does not relay for the network."""
        return self._peer_address if self.relay.offers and not self._own.is_local else ""

    async def start(self) -> None:
        """Accept tunnels, and look for relays if they are already known to be needed."""
        host = LOOPBACK if self._own.grpc_host in ANY_HOSTS else self._own.grpc_host
        await Acceptor(self._streams, host, self._own.port, self._seen_by, self.origins).start()
        await self.relay.start()
        await serve_dial_back(self._streams)
        await self._find_own()
        if self._wants_relays:
            await self._find_relays(())

    async def attach(self) -> None:
        """Attach to a libp2p daemon that was started again."""
        await self._streams.attach()
        self._attached.set()
        self._wake.set()

    async def keep(
        self, publish: Callable[[], Awaitable[object]], offered: Callable[[], Awaitable[Iterable[str]]]
    ) -> None:
        """Keep the server reachable for ever; call ``publish`` whenever the addresses have changed.

        ``offered`` returns addresses of relays, which are used besides other members.
        """
        while True:
            before = self.addresses, self.relay_address
            try:
                await self._look(offered)
            except _NO_DAEMON as error:
                _logger.info("looking how others reach this server: %s", error)
            if (self.addresses, self.relay_address) != before:
                with logged_errors(_logger, "the swarm was not told of this server's new addresses"):
                    await publish()
            await self._pause()

    async def close(self) -> None:
        for held in self._reservations.values():
            held.close()
        self._reservations.clear()

    async def _look(self, offered: Callable[[], Awaitable[Iterable[str]]]) -> None:
        if (host := await asyncio.to_thread(self._own.moved)) is not None:  # this call looks names up
            _logger.warning("the address of this machine is %s now, it was %s", host, self._own.host)
            self._own.move(host)
            self._attached.clear()
            self._dht.move(host)
            async with asyncio.timeout(_RESTART_S):
                await self._attached.wait()  # nothing can be published before
            self._asked_s = -inf
        self._forget_lost()
        await self._find_own()
        if time.monotonic() - self._asked_s > _ASK_EVERY_S:
            await self._ask_others()
        if not self._wants_relays:
            await self.close()
        elif len(self._reservations) < WANTED:
            await self._find_relays(await offered())

    def _seen_by(self, relay_id: str) -> str | None:
        held = self._reservations.get(relay_id)
        return None if held is None else held.host

    async def _find_own(self) -> None:
        addresses = await self._dht.addresses()
        self._peer_address = next((a for a in addresses if not is_loopback(a)), addresses[0])

    async def _ask_others(self) -> None:
        """Ask some members whether they reach this server; each answers for its own place in the network."""
        if self._config.relay != "auto" or self._own.is_local:
            return
        self._asked_s = time.monotonic()
        direct, libp2p = self._own.direct(), _host_port(self._peer_address)
        peers = [*await self._dht.peers(), *self._members()]
        asked = {peer.rpartition("/p2p/")[2]: peer for peer in peers if not is_loopback(peer)}
        asking = (ask_dial_back(self._streams, peer, [*direct, libp2p]) for peer in list(asked.values())[:_MAX_ASKED])
        said = await _tried(await asyncio.gather(*asking), self._own.announced_host)
        if not said:
            return
        wanted_relays, self._wants_relays = self._wants_relays, is_unreachable(said, direct)
        self._takes_tunnels = self._wants_relays and not is_unreachable(said, [libp2p])
        self.is_reachable = serves_others(said, direct, self.is_reachable)
        self._dht.serve_others(serves_others(said, [libp2p], self._dht.serves_others))
        if self._wants_relays and not wanted_relays:
            _logger.warning(
                "others cannot connect to this server at %s: it looks for relays among them; to be reached directly, "
                "open the ports of --port and --dht-port, and give --announce-address",
                ", ".join(direct),
            )

    async def _find_relays(self, offered: Iterable[str]) -> None:
        members = [*self._members(), *await self._dht.peers()]
        asked = candidates(filter(None, offered), members, self._dht.peer_id, self._reservations, self._failed)
        found = [held for held in await asyncio.gather(*map(self._reserve, asked)) if held is not None]
        kept = best({held.relay_id: held.rtt_s for held in found}, WANTED - len(self._reservations))
        for held in found:
            if held.relay_id not in kept:
                held.close()
                continue
            self._reservations[held.relay_id] = held
            held.lost.add_done_callback(lambda _: self._wake.set())
            _logger.info("others reach this server through relay %s", short_id(held.relay_id))

    async def _reserve(self, relay: str) -> RelayReservation | None:
        peer_id = relay.rpartition("/p2p/")[2]
        try:
            held = await reserve(self._streams, relay, self._membership, self._config.relay_keepalive_s)
        except SwarmError as error:
            _logger.info("%s does not relay for this server: %s", short_id(peer_id), error)
            self._failed[peer_id] = time.monotonic()
            return None
        self._failed.pop(peer_id, None)
        return held

    def _forget_lost(self) -> None:
        for peer_id, held in list(self._reservations.items()):
            if held.lost.done():
                _logger.warning("relay %s does not answer any more", short_id(peer_id))
                self._failed[peer_id] = time.monotonic()
                held.close()
                del self._reservations[peer_id]

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
        if not self._dht.is_alive:  # another task starts a daemon, and then calls ``attach``
            await asyncio.sleep(_AGAIN_S)


async def can_be_reached(p2p: P2P, initial_peers: Sequence[str], announced_host: str | None = None) -> bool:
    """Return whether initial peers reach a libp2p daemon that has just started, or True if none of them answers.

    ``announced_host`` is the host of the configured address, if any.
    """
    streams = DaemonStreams(lambda: p2p)
    peers = [peer for peer in initial_peers if not is_loopback(peer)][:_MAX_ASKED]
    own = [_host_port(str(address)) for address in await p2p.get_visible_maddrs()]

    async def ask(peer: str) -> pb.DialedBack | None:
        target = tcp_target(peer)
        if target is not None and not await connects(*target):  # otherwise libp2p would wait before it dials again
            return None
        return await ask_dial_back(streams, peer, own)

    said = await _tried(await asyncio.gather(*map(ask, peers)), announced_host)
    return serves_others(said, own, served=False)


async def _tried(answers: Iterable[pb.DialedBack | None], announced_host: str | None) -> list[Sequence[str]]:
    """Return the addresses that each member reached, for members whose test counts.

    A member that sees this server at another address than the announced one, as in its local network, does not count.
    """
    announced = None if announced_host is None else await ips_of(announced_host)
    heard = (answer for answer in answers if answer is not None)
    return [answer.reached for answer in heard if announced is None or answer.host in announced]


def _host_port(peer: str) -> str:
    """Return the host and port of a multiaddr such as /ip4/192.0.2.1/tcp/31330."""
    _, _, host, _, port, *_ = peer.split("/")
    return host_port(host, int(port))
