"""A client's connection to its swarm: the DHT, the servers it talks to, and the chain it takes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from swarm_client.config import ClientConfig
from swarm_client.routing import Chain, fastest_chain, no_route, usable
from swarm_client.transport import Server
from swarm_protocol.dht import Dht
from swarm_protocol.errors import NoRoute, NoSwarm, PeerError
from swarm_protocol.identity import Identity
from swarm_protocol.notes import Notes
from swarm_protocol.records import ServerRecord, SwarmView
from swarm_protocol.span import Span

if TYPE_CHECKING:
    from swarm_protocol.checkpoint import Checkpoint

_logger = logging.getLogger(__name__)
_POLL_S = 0.5  # while blocks are missing
_BAN_S = 15.0


async def join_as_client(config: ClientConfig) -> Dht:
    """A DHT node that only asks.

    Raises:
        NoSwarm: no member of the swarm answers, or none is known.
    """
    peers: Sequence[str] = config.initial_peers
    if not peers:
        notes = Notes(config.swarm)
        peers = notes.read()
        if not peers:
            raise NoSwarm(
                f"no swarm named {config.swarm!r} runs on this machine: start a server with `python -m swarm_server`, "
                "or give initial peers"
            )
    return await Dht.join(config.swarm, peers, Identity.generate())


def closed_error() -> NoSwarm:
    return NoSwarm("the model was closed: load it again to go on")


class Swarm:
    """The servers of one model. All methods but the constructor run on the background loop."""

    def __init__(self, config: ClientConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self.model = checkpoint.name
        self.revision = checkpoint.revision
        self.num_blocks = checkpoint.family.num_blocks
        self._dht: Dht | None = None
        self._view = SwarmView()
        self._view_time = float("-inf")
        self._servers: dict[str, Server] = {}
        self._rtts_s: dict[str, float] = {}
        self._banned_until: dict[str, float] = {}
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        """Joins the DHT; raises NoSwarm if nobody answers."""
        self._dht = await join_as_client(self.config)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()
        self._servers.clear()
        if self._dht is not None:
            await self._dht.shutdown()
            self._dht = None

    @property
    def closed(self) -> bool:
        return self._dht is None

    async def view(self, max_age_s: float) -> SwarmView:
        """What the DHT says, at most ``max_age_s`` old."""
        if self._dht is None:
            raise closed_error()
        if time.monotonic() - self._view_time > max_age_s:
            self._view = await self._dht.view(self.model)
            self._view_time = time.monotonic()
        return self._view

    async def chain(self, blocks: Span, need_tokens: int = 0, avoid: Collection[str] = ()) -> Chain:
        """The fastest chain over ``blocks`` without the servers to ``avoid``; waits for missing blocks.

        Raises:
            NoRoute: some block is still not served after ``wait_timeout_s``, or only by servers to avoid; the message
                names it.
        """
        deadline = time.monotonic() + self.config.wait_timeout_s
        max_age_s = self.config.view_max_age_s
        while True:
            view = await self.view(max_age_s)
            servers, left_out = usable(view, self.revision, self.num_blocks, {*self._banned(), *avoid})
            try:
                return fastest_chain(servers, blocks, rtts_s=self._rtts_s, need_tokens=need_tokens)
            except NoRoute:
                error = no_route(servers, blocks, left_out)
            if avoid:
                raise error
            if time.monotonic() + _POLL_S > deadline:
                raise NoRoute(f"{error}; waited {self.config.wait_timeout_s:g} s", error.missing)
            if max_age_s == self.config.view_max_age_s:
                _logger.warning("%s; waiting for up to %g s", error, self.config.wait_timeout_s)
                max_age_s = 0.0
            await asyncio.sleep(_POLL_S)

    async def server(self, record: ServerRecord) -> Server:
        """An open connection; raises PeerUnavailable or BadReply if there cannot be one."""
        async with self._connecting:
            known = self._servers.get(record.peer_id)
            if known is not None and known.leads_to(record):
                known.record = record
                return known
            server = await Server.connect(record, self.config.step_timeout_s)
            if known is not None:
                await known.close()
            self._servers[record.peer_id] = server
        self._rtts_s[record.peer_id] = await server.ping()
        return server

    async def failed(self, error: PeerError) -> None:
        """Leaves the server out for a while and reads the DHT anew."""
        if error.peer_id:
            self._banned_until[error.peer_id] = time.monotonic() + _BAN_S
            self._servers.pop(error.peer_id, None)  # not closed: other sessions may still go through it
        self._view_time = float("-inf")

    def _banned(self) -> set[str]:
        now = time.monotonic()
        self._banned_until = {peer: until for peer, until in self._banned_until.items() if until > now}
        return set(self._banned_until)
