"""A client's identity, by which the DHT and servers know the client during its whole life."""

from __future__ import annotations

from functools import cached_property

from swarm_client.core.access import client_access
from swarm_client.core.config import ClientConfig
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.lan_discovery import find_members
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import JoinRefused, NoSwarm
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.process.invocation import typed
from swarm_protocol.process.local_registry import DEFAULT_SWARM, LocalRegistry, addresses_of, registered_swarms
from swarm_protocol.streams.streams import DaemonStreams
from swarm_protocol.tunnel.dialing import Dialer
from swarm_protocol.tunnel.members import RelayCredentials


class ClientIdentity:
    """A client's identity for the DHT and for servers. The key is generated, or read from a file, at first use."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._dht: Dht | None = None  # the last DHT node that has joined: tunnels go through its libp2p daemon

    @cached_property
    def access(self) -> SwarmAccess:
        """Return the client's access to the swarm. Raise ValueError as ``SwarmAccess.of`` does."""
        return client_access(self._config)

    @cached_property
    def identity(self) -> Identity:
        """Return the identity in the DHT. It is new if the key may be shared: no two DHT nodes may have one key."""
        return Identity.generate() if self.access.token or self._config.identity else self.access.identity

    @cached_property
    def credentials(self) -> ClientCredentials:
        return ClientCredentials(self.access.identity, self.access.token)

    @cached_property
    def dialer(self) -> Dialer:
        streams = DaemonStreams(lambda: None if self._dht is None else self._dht.p2p)
        return Dialer(self.credentials, streams, RelayCredentials(self.access.identity, self.access.token))

    async def connect(self, record: ServerRecord, config: ClientConfig) -> ServerConnection:
        """Connect to a server: see ``ServerConnection.connect``."""
        return await ServerConnection.connect(record, config, self.dialer)

    async def join(self, config: ClientConfig) -> Dht:
        """Join the DHT: see ``join_swarm``."""
        self._dht = await join_swarm(config, self.identity, self.access.control)
        return self._dht

    async def close(self) -> None:
        """End the tunnels."""
        if "dialer" in self.__dict__:  # without a dialer, there are no tunnels
            await self.dialer.close()


async def join_swarm(config: ClientConfig, identity: Identity, access: AccessControl | None) -> Dht:
    """Return a DHT node that only makes requests.

    Raises:
        NoSwarm: no member of the swarm answers, or none is known.
    """
    initial_peers = config.initial_peers
    if config.discover:
        initial_peers += tuple(await find_members(config.swarm))
    if initial_peers:
        return await Dht.join(config.swarm, initial_peers, identity, access=access)
    registry = LocalRegistry(config.swarm)
    servers = registry.servers()
    addresses, what = addresses_of(servers), "runs on this machine"
    if addresses:
        try:
            return await Dht.join(
                config.swarm,
                addresses,
                identity,
                are_alive=lambda: registry.some_live([server for server in servers if server.addresses]),
                access=access,
            )
        except JoinRefused:
            raise
        except NoSwarm:
            what = "answered, though servers of it are registered on this machine"
    elif servers:
        what += ", only in another container or on another machine, where it cannot be reached"
    flag = "" if config.swarm == DEFAULT_SWARM else f" --swarm {config.swarm}"
    raise NoSwarm(
        f"no swarm named {config.swarm!r} {what}{_others(config.swarm)}: "
        f"start a server with `{typed('server')}{flag}`, or give initial peers"
    )


def _others(swarm: str) -> str:
    """Return the names of other registered swarms as the end of a sentence; empty if there are none."""
    names = [name for name in registered_swarms() if name != swarm]
    return f" (there {'is' if len(names) == 1 else 'are'} {', '.join(map(repr, names))})" if names else ""
