"""The choice of the span that a server hosts: the first one, and later moves when the swarm needs others more."""

from __future__ import annotations

import asyncio
import logging
from math import inf

from swarm_protocol.dht.claims import within_addresses
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import WIRE_VERSION
from swarm_server.core.prefix_sharing import prefix_sharing
from swarm_server.machine.memory import available_bytes, hosted_bytes, num_that_fit
from swarm_server.net.neighbours import Neighbours
from swarm_server.net.network_probe import NetworkProbe
from swarm_server.node.presence import RecordPublisher
from swarm_server.node.states import Draining, Joined, Loading, Serving, Starting, Unloaded
from swarm_server.placement.placement import (
    CONFIRM_S,
    URGENT_DRAIN_S,
    choose_span,
    may_leave,
    others_first,
    own_move,
)
from swarm_server.verification.blocklist import Blocklist

_logger = logging.getLogger(__name__)
_BLOCKS_OF_FREE, _BLOCKS_OF_GIVEN = 0.6, 0.8  # of memory; the rest is for keys and values
_SETTLE_S = 0.3  # after this time, servers that join together have read each other's choices
_MAX_SETTLING = 10  # how often a choice is reconsidered


def num_hosted(starting: Starting) -> int:
    """Return the number of blocks that a server hosts.

    Raises:
        ValueError: there is no room for one block, or the model has fewer blocks than the configuration wants.
    """
    config, num_blocks = starting.config, starting.checkpoint.family.num_blocks
    if config.num_blocks is not None:
        if config.num_blocks > num_blocks:
            raise ValueError(f"{config.num_blocks} blocks are more than the model's {num_blocks}")
        return config.num_blocks
    sizes_bytes = hosted_bytes(starting.checkpoint, config.quant)
    share = _BLOCKS_OF_FREE if config.memory_bytes is None else _BLOCKS_OF_GIVEN
    free_bytes = [config.memory_bytes] if config.memory_bytes else list(map(available_bytes, starting.devices))
    if config.tensor_parallel and not config.memory_bytes:  # all devices hold equally many rows of each block
        free_bytes = [len(free_bytes) * min(free_bytes)]
    affordable = sum(num_that_fit(sizes_bytes, starting.loader.block_bytes_in(free * share)) for free in free_bytes)
    if affordable < 1:
        given = "free memory" if config.memory_bytes is None else f"memory in {config.memory_bytes >> 20} MiB"
        raise ValueError(
            f"not enough {given} for one block, which takes {max(sizes_bytes) / 2**20:.1f} MiB beside keys and values"
        )
    return min(affordable, num_blocks)


class PeerMonitor:
    """The view of the servers that serve the same revision of the model, without those known to be dead or to answer
    wrongly."""

    def __init__(self, joined: Joined, network_probe: NetworkProbe, blocklist: Blocklist) -> None:
        self._dht = joined.membership.dht
        self._checkpoint = joined.starting.checkpoint
        self._known_speeds = joined.starting.loader.known_speeds
        self._network_probe = network_probe
        self._blocklist = blocklist

    async def servers(self) -> SwarmView:
        """Return all servers of the model, whether they answer or not."""
        return await self._dht.view(self._checkpoint.name, self._checkpoint.family.num_blocks)

    async def relays(self) -> list[str]:
        """Return the addresses at which servers of the model relay for others; an address is empty if one does not."""
        return [server.relay_address for server in (await self.servers()).servers]

    async def view(self, own: ServerRecord | None = None) -> SwarmView:
        """Return the living servers of the same revision; ``own`` is this server's published record, if any."""
        view = await self.servers()
        kind = self._checkpoint.revision, WIRE_VERSION
        same = SwarmView(
            within_addresses(
                server
                for server in view.servers
                if (server.revision, server.wire_version) == kind and server.peer_id not in self._blocklist
            )
        )
        return await self._network_probe.living(same, own)

    async def choose_span(self, num_hosted: int, own: ServerRecord | None = None) -> Span:
        """Return the span to host; ``own`` is this server's published record, if it has chosen before."""
        view = await self.view(own)
        if own is not None:
            view = others_first(view, own.peer_id)
        speeds = self._known_speeds(num_hosted)
        tokens_per_s = 0.0 if speeds is None else speeds.forward_tokens_per_s
        return choose_span(view, self._checkpoint.family.num_blocks, num_hosted, tokens_per_s)

    async def measure_network(self, own: ServerRecord) -> None:
        await self._network_probe.measure(await self.view(own), own)


class SpanMover:
    """The mover of a server: it hosts one span after the other, and keeps the published record up to date."""

    def __init__(self, joined: Joined, monitor: PeerMonitor, presence: RecordPublisher) -> None:
        starting = joined.starting
        self._loader = starting.loader
        self._neighbours = Neighbours(starting.channels, monitor.servers)
        self._num_blocks = starting.checkpoint.family.num_blocks
        self._margin = starting.config.balance_margin
        self._drain_timeout_s = starting.config.drain_timeout_s
        self._monitor = monitor
        self._presence = presence
        self._counters = starting.counters
        self._prefix_sharing = prefix_sharing(starting.config, starting.access, joined.membership.host)

    async def settle(self, state: Loading) -> Loading:
        """Choose once more, and again while other servers, which may have chosen at the same time, are joining."""
        for _ in range(_MAX_SETTLING):
            await asyncio.sleep(_SETTLE_S)
            own = state.record
            servers = (await self._monitor.view(own)).servers
            others = [server for server in servers if server.peer_id != own.peer_id]
            span = await self._monitor.choose_span(len(own.span), own)
            if span != own.span:
                state = state.choose(span)
                self._presence.enter(state)
                await self._presence.publish()
            if not any(server.state is ServerState.JOINING and not server.pinned for server in others):
                break
        return state

    async def host(self, state: Loading) -> Serving:
        stack = await self._loader.load(state.record.span)
        runtime = await self._loader.start(stack, self._neighbours, self._prefix_sharing)
        serving = state.serve(runtime, self._loader.members)
        self._presence.enter(serving)
        return serving

    async def measure_network(self) -> None:
        await self._monitor.measure_network(self._presence.state.record)

    async def rebalance(self) -> None:
        """Move if the swarm needs it. Raise if even the old blocks cannot be loaded again; the next call retries."""
        old = self._presence.state.record.span
        if isinstance(self._presence.state, Loading | Unloaded):  # the last call failed
            await self._host_again(self._presence.state)
            return
        loading = await self._leave_if_needed()  # no variable refers to the old blocks: frees their memory
        if loading is not None:
            await self._host_instead(loading, old)

    async def _host_again(self, state: Loading | Unloaded) -> None:
        loading = state if isinstance(state, Loading) else state.load(state.record.span)
        self._presence.enter(loading)
        await self.host(loading)
        await self._presence.publish()
        _logger.info("hosting blocks %s", loading.record.span)

    async def _leave_if_needed(self) -> Loading | None:
        """Return the next state if the server has left its blocks for others, else None."""
        state = self._presence.state
        if not isinstance(state, Serving | Draining):  # Draining: the last move failed half-way
            return None
        if state.record.pinned or len(state.record.span) == self._num_blocks:
            return None
        view, peer_id = await self._monitor.view(state.record), state.record.peer_id
        to = await asyncio.to_thread(own_move, view, peer_id, self._num_blocks, self._margin)
        return None if to is None else await self._leave(state, to)

    async def _leave(self, hosting: Serving | Draining, to: Span) -> Loading | None:
        """Leave for another span; return None if other servers do not allow it."""
        planning, peer_id = hosting.plan_move(to), hosting.record.peer_id
        self._presence.enter(planning)
        await self._presence.publish()
        await asyncio.sleep(CONFIRM_S)
        view = await self._monitor.view(planning.record)
        if not await asyncio.to_thread(may_leave, view, peer_id, self._num_blocks, self._margin):
            self._presence.enter(planning.stay())
            await self._presence.publish()
            return None
        draining = planning.drain(to)
        self._presence.enter(draining)
        await self._presence.publish()
        _logger.info("moving from blocks %s to %s, where the swarm needs it more", planning.record.span, to)
        limit_s = inf if all(view.replicas(self._num_blocks)) else URGENT_DRAIN_S
        await draining.runtime.host.leave(min(self._drain_timeout_s, limit_s))
        return (await self._unload(draining)).load(to)

    async def _host_instead(self, loading: Loading, old: Span) -> None:
        """Host the new blocks, or the ``old`` ones again if the new ones cannot be loaded."""
        self._presence.enter(loading)
        await self._presence.publish()
        to = loading.record.span
        failure = await self._failure_to_host(loading)
        if failure:
            _logger.warning("blocks %s could not be loaded: %s; going back to %s and staying there", to, failure, old)
            loading = loading.stay_with(old)
            self._presence.enter(loading)
            await self.host(loading)
        await self._presence.publish()
        if self._presence.state.record.span != old:
            self._counters.move()
        _logger.info("hosting blocks %s", self._presence.state.record.span)

    async def _failure_to_host(self, loading: Loading) -> str:
        """Host the span; return the error message or "". An exception object would keep the loaded blocks in memory."""
        try:
            await self.host(loading)
        except Exception as error:  # whichever reason there is, the server goes back to its old blocks
            return str(error) or type(error).__name__
        return ""

    async def drain(self) -> None:
        """Let generations end or move to other servers, and host no more blocks."""
        match self._presence.state:
            case Serving() | Draining() as hosting:
                await self._drain(hosting.drain())
            case Loading() | Unloaded() as state:  # stopped in the middle of a move
                self._presence.enter(state.drain())

    async def _drain(self, draining: Draining) -> None:
        self._presence.enter(draining)
        host, timeout_s = draining.runtime.host, self._drain_timeout_s
        if not host.num_sessions:
            await host.leave(timeout_s)
            return
        _logger.info(
            "leaving: waiting up to %g s for %d %s to end or move; a second signal exits at once",
            timeout_s,
            host.num_sessions,
            "session" if host.num_sessions == 1 else "sessions",
        )
        publishing = asyncio.ensure_future(self._presence.publish())
        await host.leave(timeout_s)
        await publishing

    async def close(self) -> None:
        """End the sessions that are left."""
        state = self._presence.state
        if isinstance(state, Serving | Draining):
            await self._unload(state)

    async def _unload(self, hosting: Serving | Draining) -> Unloaded:
        unloaded = hosting.unload()
        self._presence.enter(unloaded)  # entered first, so that no session is opened while the others end
        await hosting.runtime.close()
        return unloaded
