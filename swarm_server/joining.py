"""How a server finds its swarm: through the peers it is given, or through other servers of this machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack

from swarm_protocol.dht import Dht
from swarm_protocol.errors import NoSwarm
from swarm_protocol.identity import Identity
from swarm_protocol.notes import Notes
from swarm_server.addresses import free_port, split_address
from swarm_server.config import ServerConfig

_logger = logging.getLogger(__name__)


async def join(config: ServerConfig, cleanup: AsyncExitStack) -> Dht:
    """A DHT node that stores records for others, and that others of this machine find until ``cleanup``.

    Raises:
        NoSwarm: no initial peer answers. ValueError: one is no multiaddr, or the identity cannot be used.
    """
    identity = Identity.load_or_create(config.identity) if config.identity else Identity.generate()
    notes = Notes(config.swarm)
    announce_host = config.announce_address and split_address(config.announce_address, 0)[0]
    port = config.dht_port or (free_port(config.host) if announce_host else 0)

    async def join_through(initial_peers: list[str]) -> Dht:
        return await Dht.join(
            config.swarm, initial_peers, identity, host=config.host, port=port, announce_host=announce_host
        )

    with ExitStack() as held:
        # Another server may hold it for seconds: signals must be heard meanwhile.
        await asyncio.to_thread(held.enter_context, notes.locked())
        noted = notes.read()
        if config.initial_peers:
            dht = await join_through(list(config.initial_peers))
        else:
            dht = await _join_noted(noted, notes, join_through)
        cleanup.push_async_callback(dht.shutdown)
        if noted and config.initial_peers:
            # Noting this one too would merge two swarms that only share a name.
            _logger.info("another swarm named %s runs here; use --swarm to keep them apart", config.swarm)
        else:
            notes.write(identity.peer_id, (await dht.addresses())[0])
            cleanup.callback(notes.remove, identity.peer_id)
    return dht


async def _join_noted(noted: list[str], notes: Notes, join_through: Callable) -> Dht:
    """Joins through a noted server of this machine, forgetting notes that lead nowhere; founds the swarm otherwise."""
    while noted:
        try:
            return await join_through(noted)
        except NoSwarm:
            for address in noted:
                notes.discard(address)
            noted = []
    return await join_through([])
