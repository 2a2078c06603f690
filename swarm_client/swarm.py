"""A client's connection to its swarm: the DHT, the servers it talks to, and the chain it takes."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass

from swarm_client.background import now_s
from swarm_client.config import ClientConfig
from swarm_client.routing import Chain, best_replica, fastest_chain, no_route, usable
from swarm_client.transport import Server
from swarm_protocol.dht import Dht
from swarm_protocol.errors import NoRoute, NoSwarm, PeerError
from swarm_protocol.identity import Identity
from swarm_protocol.notes import Notes
from swarm_protocol.records import LIFETIME_S, ServerRecord, SwarmView
from swarm_protocol.span import Span

Connect = Callable[[ServerRecord, float], Awaitable[Server]]
_logger = logging.getLogger(__name__)
_POLL_S = 0.5  # while blocks are missing
_BAN_S, _MAX_BAN_S = 5.0, 60.0
_JUST_NOW_S = 1.0  # so long a server that failed is left alone even if there is no other
_VIEW_TIMEOUT_S = 10.0


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

    def __init__(
        self,
        config: ClientConfig,
        model: str,
        revision: str,
        num_blocks: int,
        *,
        dht: Dht | None = None,
        connect: Connect = Server.connect,
    ) -> None:
        """``dht`` and ``connect`` stand for the network; without ``dht``, ``connect()`` joins the one of ``config``."""
        self.config = config
        self.model = model
        self.revision = revision
        self.num_blocks = num_blocks
        self._connect = connect
        self._dht = dht
        self._view = SwarmView()
        self._view_time = float("-inf")
        self._servers: dict[str, Server] = {}
        self._rtts_s: dict[str, float] = {}
        self._bans: dict[str, _Ban] = {}
        self._filled_time = float("-inf")  # when the view was last read and not empty
        self._connecting: dict[str, asyncio.Lock] = {}
        self._reading = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()
        self.sessions: weakref.WeakSet = weakref.WeakSet()

    async def connect(self) -> None:
        """Joins the DHT; raises NoSwarm if nobody answers."""
        if self._dht is None:
            self._dht = await join_as_client(self.config)
        self._soon(self._keep_fresh())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
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
        """What the DHT says, at most ``max_age_s`` old; what it said last if it cannot be read."""
        if self._dht is None:
            raise closed_error()
        if now_s() - self._view_time > max_age_s:
            await self._read_view()
        return self._view

    async def _read_view(self) -> None:
        async with self._reading:
            if self._dht is None:
                raise closed_error()
            try:
                view = await asyncio.wait_for(self._dht.view(self.model, self.num_blocks), _VIEW_TIMEOUT_S)
            except (asyncio.TimeoutError, OSError) as error:
                _logger.info("the DHT cannot be read: %r", error)
                return
            if view.servers or now_s() - self._filled_time > LIFETIME_S:
                self._view = view
                self._filled_time = now_s()
            self._view_time = now_s()

    async def _keep_fresh(self) -> None:
        """While there are sessions, so that a replacement is known when one of their servers fails."""
        while self._dht is not None:
            await asyncio.sleep(self.config.view_max_age_s)
            if self.sessions and now_s() - self._view_time >= self.config.view_max_age_s:
                await self._read_view()

    async def chain(
        self,
        blocks: Span,
        need_tokens: int = 0,
        avoid: Collection[str] = (),
        *,
        timeout_s: float | None = None,
        like: ServerRecord | None = None,
        on_wait: Callable[[str, float], None] | None = None,
    ) -> Chain:
        """The fastest chain over ``blocks`` without the servers to ``avoid``; waits for missing blocks.

        Args:
            timeout_s: how long to wait; by default ``wait_timeout_s``.
            like: servers that compute as this one does are preferred. A chain is wanted at once then: what is known of
                the swarm is good enough as long as it leads somewhere.
            on_wait: told why there is no chain, and for how many seconds there may be none.

        Raises:
            NoRoute: some block is still not served after that time, or only by servers to avoid; the message names it.
        """
        timeout_s = self.config.wait_timeout_s if timeout_s is None else timeout_s
        deadline = now_s() + timeout_s
        max_age_s = self.config.view_max_age_s if like is None else float("inf")
        waits = False
        while True:
            view = await self.view(max_age_s)
            try:
                return self._choose(view, blocks, need_tokens, avoid, like)
            except NoRoute as failure:
                error = failure
            if max_age_s == float("inf"):
                max_age_s = 0.0
                continue
            if avoid:
                raise error
            if now_s() + _POLL_S > deadline:
                raise NoRoute(f"{error}; waited {timeout_s:g} s", error.missing)
            if not waits:
                waits, max_age_s = True, 0.0
                (on_wait or _say_that_it_waits)(str(error), deadline - now_s())
            await asyncio.sleep(_POLL_S)

    def _choose(
        self, view: SwarmView, blocks: Span, need_tokens: int, avoid: Collection[str], like: ServerRecord | None
    ) -> Chain:
        """Servers that failed lately are taken only if there is no other way."""
        error: NoRoute | None = None
        for banned in (self._banned(), self._banned(just_now=True)):
            servers, left_out = usable(view, self.revision, self.num_blocks, {*banned, *avoid})
            kinds = [servers] if like is None else [_alike(servers, like), servers]
            for kind in kinds:
                try:
                    return fastest_chain(kind, blocks, rtts_s=self._rtts_s, need_tokens=need_tokens)
                except NoRoute:
                    pass
            error = error or no_route(servers, blocks, left_out)
        raise error

    def replica(self, span: Span, need_tokens: int, avoid: Collection[str], like: ServerRecord) -> ServerRecord | None:
        """One other server that could hold a copy of a session over ``span``, as far as is known."""
        servers, _ = usable(self._view, self.revision, self.num_blocks, {*self._banned(), *avoid})
        return best_replica(_alike(servers, like), span, rtts_s=self._rtts_s, need_tokens=need_tokens)

    async def server(self, record: ServerRecord) -> Server:
        """An open connection; raises PeerUnavailable or BadReply if there cannot be one."""
        async with self._connecting.setdefault(record.peer_id, asyncio.Lock()):
            known = self._servers.get(record.peer_id)
            if known is not None and known.leads_to(record):
                known.record = record
                return known
            server = await self._connect(record, self.config.step_timeout_s)
            if known is not None:
                await known.close()
            self._servers[record.peer_id] = server
        self._rtts_s[record.peer_id] = await server.ping()
        return server

    def failed(self, error: PeerError) -> None:
        """Leaves the server out for a while, longer each time, and reads the DHT anew."""
        if error.peer_id:
            now = now_s()
            last = self._bans.get(error.peer_id)
            duration_s = _BAN_S if last is None else min(2 * last.duration_s, _MAX_BAN_S)
            self._bans[error.peer_id] = _Ban(now, duration_s)
            self._servers.pop(error.peer_id, None)  # not closed: other sessions may still go through it
        self._view_time = float("-inf")
        if self._dht is not None and not self._reading.locked():
            self._soon(self._read_view())

    def served(self, peer_id: str) -> None:
        """The server works: what it did before is forgiven."""
        self._bans.pop(peer_id, None)

    def _banned(self, just_now: bool = False) -> set[str]:
        now = now_s()
        return {
            peer for peer, ban in self._bans.items() if ban.since + (_JUST_NOW_S if just_now else ban.duration_s) > now
        }

    def _soon(self, coroutine: Coroutine) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


@dataclass(frozen=True)
class _Ban:
    since: float
    duration_s: float


def _alike(view: SwarmView, like: ServerRecord) -> SwarmView:
    """The servers that round as ``like`` does."""
    kind = like.quant, like.dtype
    return SwarmView(tuple(server for server in view.servers if (server.quant, server.dtype) == kind))


def _say_that_it_waits(reason: str, timeout_s: float) -> None:
    _logger.warning("%s; waiting for up to %.3g s", reason, timeout_s)
