"""Joining a swarm, through given peers or other servers of this machine, and staying a member."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from math import inf

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.lan_discovery import LanDiscovery, local_address
from swarm_protocol.dht.node import Listening
from swarm_protocol.errors import JoinRefused, NoSwarm
from swarm_protocol.net.hivemind_parts import P2P
from swarm_protocol.net.hosts import split_address
from swarm_protocol.net.ip_networks import parse_host
from swarm_protocol.process.local_registry import LocalRegistry, addresses_of, is_loopback, remove_ended_swarms
from swarm_server.core.config import ServerConfig
from swarm_server.node.addresses import claimed, free_port, ip_address, lan_address, listening_host
from swarm_server.reach.own_addresses import LOOPBACK, OwnAddresses
from swarm_server.reach.reach import can_be_reached

_LOCK_TIMEOUT_S = 90.0  # for servers that are joining, which wait in turn for peers that do not answer
_MAX_MET = 3  # unknown peers contacted at a time: in a large swarm, a node does not know all others
_RESTARTS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)  # pauses before the libp2p daemon is started again
_STEADY_S = 60.0  # a daemon that has run for so long counts as healthy
_logger = logging.getLogger(__name__)


class SwarmMembership:
    """A server's membership in its swarm: its DHT node, and its registry entry for other servers of this machine.

    A swarm can start as two separate halves if servers start while others are frozen, cut off or too busy to answer.
    A server that finds a peer of the other half merges the two.
    """

    def __init__(
        self,
        config: ServerConfig,
        registry: LocalRegistry,
        dht: Dht,
        addresses: list[str],
        host: str = LOOPBACK,
        discovered: Callable[[], Sequence[str]] = list,
        joined_through: Sequence[str] = (),
        advertise: Callable[[Sequence[str]], Awaitable[object]] | None = None,
    ) -> None:
        """Register this server; ``host`` is its listening address, ``discovered`` returns members on the local network.

        ``joined_through``: members that were given or found first. ``advertise`` announces this server's addresses on
        the local network.
        """
        self.dht = dht
        self.host = host
        self._registry = registry
        self._addresses = addresses
        self._config = config
        self._discovered = discovered
        self._joined_through = joined_through
        self._advertise = advertise
        self._entry_fails = False
        self._num_failures = 0
        self._restarted_s = -inf
        self._after_restart: Callable[[], Awaitable[None]] | None = None
        self._keep_entry(lambda: registry.write(dht.peer_id, self.entry_points()))

    def call_after_restart(self, action: Callable[[], Awaitable[None]]) -> None:
        """Call ``action`` whenever another libp2p daemon was started."""
        self._after_restart = action

    async def keep(self) -> bool:
        """Renew the registry entry, and merge a partitioned swarm; return whether a new peer was contacted.

        The call does little if all registered servers and initial peers are known.
        """
        self._keep_entry(lambda: self._registry.renew(self.dht.peer_id, self.entry_points()))
        await self.dht.remember_peers()
        strangers = [peer for peer in self._others() if not self.dht.knows(peer.rpartition("/p2p/")[2])]
        return bool(strangers) and await self.dht.connect_to(random.sample(strangers, min(len(strangers), _MAX_MET)))

    async def restart_daemon(self) -> None:
        """Start the libp2p daemon again; without a daemon, nobody finds this server.

        Raises:
            NoSwarm: the daemon does not start, or ends again and again.
        """
        if time.monotonic() - self._restarted_s > _STEADY_S:
            self._num_failures = 0
        reason = "it ends again and again"
        while self._num_failures < len(_RESTARTS_S):
            await asyncio.sleep(_RESTARTS_S[self._num_failures])
            self._num_failures += 1
            try:
                await self.dht.restart()
            except NoSwarm as error:
                reason = str(error)
                continue
            self._restarted_s = time.monotonic()
            if self._after_restart is not None:
                await self._after_restart()
            addresses = await self.dht.addresses()
            if addresses != self._addresses:
                _logger.warning("others reach this server's libp2p daemon at %s from now on", addresses[0])
                self._addresses = addresses
                if self._advertise is not None:
                    await self._advertise(addresses)
            self._keep_entry(lambda: self._registry.write(self.dht.peer_id, self.entry_points()))
            return
        raise NoSwarm(f"the libp2p daemon ended and cannot be started again: {reason}")

    def members(self) -> list[str]:
        """Return the multiaddrs of initial and discovered peers, of which there may be none."""
        return [
            peer for peer in (*self._config.initial_peers, *self._discovered()) if not peer.endswith(self.dht.peer_id)
        ]

    def own_addresses(self) -> OwnAddresses:
        """Return this server's direct addresses; they may follow the route to the members that it joined through."""
        is_chosen = self._config.host is None
        return OwnAddresses(self.host, self._config.announce_address, is_chosen, self._joined_through)

    def entry_points(self) -> list[str]:
        """Return multiaddrs through which others join, at least one: of other members if this node serves nobody."""
        return self._addresses if self.dht.serves_others else self.members() or self._addresses

    def leave(self) -> None:
        self._keep_entry(lambda: self._registry.remove(self.dht.peer_id))

    def _others(self) -> list[str]:
        """Return addresses of initial and discovered peers, and of registered servers as reachable as this one.

        Servers that only this machine reaches would be useless to peers on the network, so the two kinds stay apart.
        """
        registered = [
            entry.addresses[0]
            for entry in self._registry.servers()
            if entry.addresses and _is_local(entry.addresses) == _is_local(self._addresses)
        ]
        return [*self.members(), *(address for address in registered if not address.endswith(self.dht.peer_id))]

    def _keep_entry(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._entry_fails:
                _logger.warning("others of this machine will not find this server by themselves: %s", error)
            self._entry_fails = True


async def join(config: ServerConfig, access: SwarmAccess, cleanup: AsyncExitStack) -> SwarmMembership:
    """Return a DHT node that stores records for others, and that others of this machine find until ``cleanup``.

    Raises:
        NoSwarm: no initial peer answers. ValueError: an initial peer is not a multiaddr, or the DHT's port is in use.
    """
    remove_ended_swarms()
    registry = LocalRegistry(config.swarm)
    announce_host = config.announce_address and split_address(config.announce_address, 0)[0]
    async with registry.locked(_LOCK_TIMEOUT_S):
        discovery = await _discover(config, cleanup) if config.discover else None
        discovered: Callable[[], Sequence[str]] = list if discovery is None else discovery.members
        given = (*config.initial_peers, *discovered())
        joined_through = given or registry.read()
        host = await asyncio.to_thread(_host, config, given, [] if given else joined_through)
        # An announced multiaddr contains the port, so it must be known before libp2p listens.
        port = config.dht_port or (free_port(host) if announce_host else 0)
        cleanup.enter_context(claimed(host, port))

        async def join_through(initial_peers: Sequence[str], are_alive: Callable[[], bool] = lambda: False) -> Dht:
            async def is_reachable(p2p: P2P) -> bool:
                return config.relay == "auto" and await can_be_reached(p2p, initial_peers, announce_host)

            return await Dht.join(
                config.swarm,
                initial_peers,
                access.identity,
                Listening(host, port, announce_host),
                are_alive=are_alive,
                access=access.control,
                is_reachable=None if config.relay == "never" else is_reachable,
            )

        dht = await _join_any(config, given, registry, join_through)
        cleanup.push_async_callback(dht.shutdown)
        addresses = await dht.addresses()
        advertise = None if discovery is None else partial(discovery.advertise, dht.peer_id)
        membership = SwarmMembership(config, registry, dht, addresses, host, discovered, joined_through, advertise)
        cleanup.callback(membership.leave)
        if advertise is not None and not await advertise(addresses):
            _logger.warning("nobody can discover this server: %s is no address of a local network", addresses[0])
    return membership


async def _discover(config: ServerConfig, cleanup: AsyncExitStack) -> LanDiscovery:
    """Discover members on the local network; return when they have answered, or should have.

    Raises:
        NoSwarm, ValueError: see ``LanDiscovery.start``. ValueError also for a host that others cannot reach.
    """
    address = None if config.host is None else parse_host(ip_address(config.host))
    if address is not None and address.is_loopback:
        raise ValueError(
            f"discover lets others find this server, and host {config.host} is for this machine alone: leave one out"
        )
    is_one = address is not None and address.version == 4 and not address.is_unspecified
    discovery = await LanDiscovery.start(config.swarm, str(address) if is_one else None)
    cleanup.push_async_callback(discovery.close)
    await discovery.wait_for_members()
    return discovery


def _host(config: ServerConfig, initial_peers: Sequence[str], registered: Sequence[str]) -> str:
    """Return ``listening_host``, or a local network's address if peers must discover it. Raise NoSwarm without one."""
    host = listening_host(config.host, initial_peers, registered)
    return local_address(lan_address()) if config.discover and host == LOOPBACK else host


async def _join_any(
    config: ServerConfig, given: Sequence[str], registry: LocalRegistry, join_through: Callable[..., Awaitable[Dht]]
) -> Dht:
    """Join through the given peers, or through a server of this machine if discovered peers do not answer.

    Found the swarm if there is no such server, or none that answers in time.
    """
    if given:
        try:
            return await join_through(given)
        except NoSwarm as error:
            if config.initial_peers or isinstance(error, JoinRefused):
                raise
            _logger.warning("found on the local network, but %s", error)
    servers = registry.servers()
    reached = [server for server in servers if server.addresses]
    if reached:
        try:
            return await join_through(addresses_of(reached), lambda: registry.some_live(reached))
        except JoinRefused:
            raise
        except NoSwarm:
            pass
    if registry.some_live(reached):
        _logger.warning(
            "no server of swarm %s answers: starting without them, and joining them as soon as they do; "
            "to start a swarm of its own, choose another name with --swarm",
            config.swarm,
        )
    elif any(server.is_alive for server in servers):
        _logger.warning(
            "swarm %s has servers in another container or on another machine that cannot be reached from here: "
            "starting without them; to be one swarm, start all with --host ADDRESS",
            config.swarm,
        )
    return await join_through([])


def _is_local(addresses: Sequence[str]) -> bool:
    return all(map(is_loopback, addresses))
