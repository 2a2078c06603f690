"""A client's connection to its swarm: the DHT, the servers in use, and the choice of chains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_client.core.lateness import Lateness
from swarm_client.core.open_sessions import OpenSessions
from swarm_client.routing.own_load import with_own_load
from swarm_client.routing.pipelining import chains_of_lanes
from swarm_client.routing.prompts import SentPrompts, with_prompts
from swarm_client.routing.routing import (
    Costs,
    Newcomers,
    Route,
    Wanted,
    best_replica,
    fastest_chain,
    no_route,
    spread,
    unknown_names,
    usable,
)
from swarm_client.swarm.caller import ClientIdentity
from swarm_client.swarm.discovery import Discovery
from swarm_client.swarm.links import Links
from swarm_client.swarm.pass_watchdog import PassWatchdog
from swarm_client.swarm.peer_health import DENIED, FAILED, SILENT, PeerBackoff, PeerTrust, RttTracker
from swarm_client.swarm.progress_tracker import ProgressTracker
from swarm_client.swarm.watchdog import StallAlarms
from swarm_client.transport.transport import ServerConnection
from swarm_protocol.dht.claims import within_addresses
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import LIFETIME_S, ServerRecord, SwarmView
from swarm_protocol.errors import AccessDenied, NoRoute, NoSwarm, PeerError, PeerUnavailable
from swarm_protocol.failures import awaited_on_error
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.shared import SharedReading, result_of
from swarm_protocol.span import Span

Connect = Callable[[ServerRecord, ClientConfig], Awaitable[ServerConnection]]
Choose = Callable[[SwarmView, bool], list[Route]]  # gets usable servers; True: unmeasured servers may be near
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_POLL_S = 0.5  # the pause between two looks for missing blocks
_MAX_TRIED = 64  # the most servers that are tried out together
_MAX_MEASURING = 5  # rounds of measuring round trips before a chain is taken as it is


def closed_error() -> NoSwarm:
    return NoSwarm("the model was closed: load it again to go on")


@dataclass(frozen=True)
class BlockTraits:
    """The properties of a model's blocks that a client must know.

    Attributes:
        hidden_size: how many numbers a hidden state has.
        routed: whether blocks choose among experts.
        has_states: whether some blocks keep a recurrent state, so that servers keep no prompts.
    """

    hidden_size: int = 0
    routed: bool = False
    has_states: bool = False


class Swarm:
    """The servers of one model. All methods but the constructor run on the background loop."""

    def __init__(
        self,
        config: ClientConfig,
        model: str,
        revision: str,
        num_blocks: int,
        *,
        traits: BlockTraits = BlockTraits(),
        caller: ClientIdentity | None = None,
        dht: Dht | None = None,
        connect: Connect | None = None,
    ) -> None:
        """Set up the object without a connection; the method ``connect`` joins the swarm.

        Args:
            caller: the identity that has joined the ``dht`` already; ``close`` closes it too.
            dht, connect: stand-ins for the DHT node and for ``ClientIdentity.connect``.
        """
        self._caller = caller = caller or ClientIdentity(config)
        self.config = config
        self.model = model
        self.revision = revision
        self.num_blocks = num_blocks
        self.traits = traits
        self.wanted = Wanted(revision, num_blocks, config.allowed_servers, config.blocked_servers, config.adapter)
        self._connect = connect or caller.connect
        self._discovery = Discovery(config, caller.join, dht)
        self.closed = dht is None
        self._view = SwarmView()
        self._part: Span | None = None  # the part of the model that the view covers; None: all of it
        self._view_time = float("-inf")
        self._filled_time = float("-inf")  # when the view was last read and not empty
        self._reading = SharedReading()
        self._servers: dict[str, ServerConnection] = {}
        self._replaced: set[ServerConnection] = set()
        self._connecting: dict[tuple[str, tuple[str, ...], bytes], asyncio.Task[ServerConnection]] = {}
        self._rtts = RttTracker(self._ping)
        self.links = Links(config, self.server, num_blocks)
        self._denials: dict[str, AccessDenied] = {}  # keys: peer ids; these servers are not asked again
        self._backoff = PeerBackoff()
        self._trust = PeerTrust()
        self.pass_watchdog = PassWatchdog(config)
        times = config.timeouts
        self.progress = ProgressTracker(2.0 * (times.probe_after_s + times.probe_s))
        self.alarms = StallAlarms()
        self.lateness = Lateness()
        self._salt = secrets.token_bytes(16)  # keeps secret which of many identities this client counts
        self._last_chains: dict[Span, Route] = {}
        self.prompts = SentPrompts()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.sessions = OpenSessions()

    async def connect(self) -> None:
        """Join the DHT.

        Raises:
            NoSwarm: no member answers.
            NoRoute: there are servers, but none of those that were requested by name.
        """
        await self._discovery.join()
        self.closed = False
        if self.wanted.by_name:
            async with awaited_on_error(self.close):
                for sentence in unknown_names(await self.view(0.0), self.wanted):
                    _logger.warning("%s", sentence)
        self.spawn(self._keep_fresh())
        self.spawn(self.lateness.watch())

    async def close(self) -> None:
        """Close all connections and leave the DHT. Sessions under way fail."""
        for task in self._tasks:
            task.cancel()
        self._rtts.close()
        for server in [*self._servers.values(), *self._replaced]:
            await server.close()
        self._servers.clear()
        await self._caller.close()
        if not self.closed:
            self.closed = True
            await self._discovery.close()

    async def view(self, max_age_s: float) -> SwarmView:
        """Return the DHT's servers, read at most ``max_age_s`` ago, or the last view if the DHT cannot be read."""
        if self.closed:
            raise closed_error()
        if now_s() - self._view_time > max_age_s:
            await self._reading.after_now(self._read_view)
        return self._view

    async def _read_view(self) -> None:
        if self.closed:
            raise closed_error()
        view = await self._discovery.view(self.model, self.num_blocks, self._part)
        if view is None:
            return
        # A DHT node without neighbours reads an empty view, so the last one counts until its records must have expired.
        if view.servers or now_s() - self._filled_time > LIFETIME_S:
            self._view = view
            self._filled_time = now_s()
            self._trust.see(view.servers, now_s())
        self._view_time = now_s()

    def _look_at(self, blocks: Span) -> None:
        """Widen the view to these blocks: only servers of the blocks in use are read from the DHT."""
        part = self._part or blocks
        part = Span(min(part.start, blocks.start), max(part.end, blocks.end))
        if part != self._part:
            self._part, self._view_time = part, float("-inf")
            self._trust.look_elsewhere()

    async def _keep_fresh(self) -> None:
        """Refresh the view while there are sessions, so that a replacement is known when one of their servers fails."""
        while not self.closed:
            await asyncio.sleep(self.config.view_max_age_s)
            if self.sessions and now_s() - self._view_time >= self.config.view_max_age_s:
                await self._reading.after_now(self._read_view)
                servers, _ = self._usable(self._banned())
                await self._rtts.measure([], servers.servers)

    async def chain(
        self,
        blocks: Span,
        need_tokens: int = 0,
        avoid: Collection[str] = (),
        *,
        timeout_s: float | None = None,
        like: ServerRecord | None = None,
        on_wait: Callable[[str, float], None] | None = None,
        on_choice: Callable[[Route], None] | None = None,
        pushes: bool = True,
        prompt_pages: Sequence[bytes] = (),
    ) -> Route:
        """Return the fastest chain over ``blocks`` without the servers to ``avoid``; wait for missing blocks.

        Args:
            timeout_s: how long to wait for missing blocks; by default ``wait_timeout_s``. With servers to ``avoid``,
                NoRoute comes at once.
            like: the server to replace. Servers of its kind are preferred, because they compute the same values. The
                chain is needed at once, so the last view is used if it has a chain, however old the view is.
            on_wait: called with the reason why there is no chain, and with the seconds that the wait may last.
            on_choice: called with the chain as soon as it is chosen, so that other sessions see its load.
            pushes: whether servers will send hidden states directly to one another.
            prompt_pages: the pages of a new session's prompt, see ``routing.prompts``. Servers that have computed a
                prompt that begins alike are preferred, unless they are loaded.

        Raises:
            NoRoute: after that time, some block is served by no server or only by servers to avoid; the message names
                it.
            AccessDenied: some block is served only by servers that do not accept this client.
        """
        is_session = like is None and need_tokens > 0
        num_known = self.prompts.num_known(prompt_pages, now_s())
        keep = self._last_chains.get(blocks, ()) if is_session else ()

        def choose(servers: SwarmView, optimistic: bool) -> list[Route]:
            costs = self._costs_among(servers, optimistic, need_tokens, pushes)
            if need_tokens > 0:
                costs = with_own_load(costs, servers, (session.load for session in self.sessions))
            costs = with_prompts(costs, servers, blocks, num_known)
            return [fastest_chain(servers, blocks, costs, () if costs.repeated_tokens else keep)]

        (chain,) = await self._when_there_is(choose, blocks, avoid, timeout_s, like, on_wait)
        if on_choice is not None:
            on_choice(chain)
        if is_session:
            self._last_chains[blocks] = chain
            if pushes:
                await self.links.prepare([chain])
        return chain

    async def chains(self, blocks: Span, sizes: Sequence[int]) -> list[Route]:
        """Return a chain for each micro-batch with so many positions, see ``spread``; wait for missing blocks.

        Raises:
            NoRoute: some block is still not served after ``wait_timeout_s``.
        """

        def choose(servers: SwarmView, optimistic: bool) -> list[Route]:
            return spread(servers, blocks, sizes, self._costs_among(servers, optimistic, pushes=False))

        routes = await self._when_there_is(choose, blocks)
        await self.links.prepare(routes, pushes=False)
        return routes

    async def chains_of_lanes(self, blocks: Span, num_rows: int, unit: int, need_tokens: int) -> list[Route]:
        """Return a chain for each lane of a session with so many rows, see ``pipelining``.

        Args:
            unit: the number of rows that stay together.
            need_tokens: the KV room that the session needs, for all rows.

        Raises:
            NoRoute: some block is not served now.
        """
        await self.chain(blocks, need_tokens, timeout_s=0.0)  # for its measurements of the chain's links

        def choose(servers: SwarmView, optimistic: bool) -> list[Route]:
            costs = self._costs_among(servers, optimistic, need_tokens)
            return chains_of_lanes(servers, blocks, num_rows, unit, costs, self.links.stages)

        chains = await self._when_there_is(choose, blocks, timeout_s=0.0)
        await self.links.prepare(chains)
        return chains

    async def _when_there_is(
        self,
        choose: Choose,
        blocks: Span,
        avoid: Collection[str] = (),
        timeout_s: float | None = None,
        like: ServerRecord | None = None,
        on_wait: Callable[[str, float], None] | None = None,
    ) -> list[Route]:
        """Return the policy's choice among the servers, once they hold all blocks."""
        timeout_s = self.config.wait_timeout_s if timeout_s is None else timeout_s
        deadline = now_s() + timeout_s
        max_age_s = self.config.view_max_age_s if like is None else float("inf")
        waits = False
        self._look_at(blocks)
        while True:
            await self.view(max_age_s)
            try:
                return await self._choose(choose, blocks, avoid, like)
            except NoRoute as failure:
                error = failure
            if max_age_s == float("inf"):  # the known view has no chain: read the DHT
                max_age_s = 0.0
                continue
            if avoid:  # the caller may take the avoided servers after all, or wait for them
                raise error
            if now_s() + _POLL_S > deadline:
                raise NoRoute(f"{error}; waited {timeout_s:g} s", error.missing)
            if not waits:
                waits, max_age_s = True, 0.0
                say = on_wait or partial(_logger.warning, "%s; waiting for up to %.3g s")
                say(str(error), deadline - now_s())
            await asyncio.sleep(_POLL_S)

    async def _choose(
        self,
        choose: Choose,
        blocks: Span,
        avoid: Collection[str],
        like: ServerRecord | None,
    ) -> list[Route]:
        """Return the policy's choice; servers that failed recently are taken only if there is no other way.

        Servers without a known round trip count as near at first. If they are chosen, they are measured, and passed
        over if they do not answer soon. When a chain is needed at once, they count as far instead.
        """
        error: NoRoute | None = None
        for just_now in (False, True):
            silent: set[str] = set()
            for optimistic in [True] * _MAX_MEASURING + [False]:
                left = self._banned(just_now) | dict.fromkeys(avoid, FAILED) | dict.fromkeys(silent, SILENT)
                servers, left_out = self._usable(left)
                try:
                    chains = _choose_kind(choose, servers, like, optimistic and like is None)
                except NoRoute:
                    error = error or no_route(servers, blocks, left_out)
                    if not silent:
                        break
                    silent.clear()  # the silent servers are needed: slow answers are better than none
                    continue
                unknown = self._unmeasured(chains)
                if not unknown or not optimistic or like is not None:  # there is no time to measure for a recovery
                    return chains
                silent |= await self._rtts.measure(unknown, servers.servers)
        assert error is not None  # the last round took no unknown server for near
        raise self._denial_of(error.missing) or error

    def _denial_of(self, missing: Iterable[Span]) -> AccessDenied | None:
        """Return why this client gets no chain if some missing block is served only by servers that refuse it."""
        servers, _ = self._usable({})
        for block in (block for span in missing for block in range(span.start, span.end)):
            holders = [s.peer_id for s in servers.servers if block in s.span and not self.is_banned(s.peer_id)]
            if holders and all(peer_id in self._denials for peer_id in holders):
                return self._denials[holders[0]]
        return None

    def _unmeasured(self, chains: Iterable[Route]) -> list[ServerRecord]:
        """Return the servers of these chains whose round trip is unknown."""
        return [hop.server for chain in chains for hop in chain if hop.server.peer_id not in self._rtts.known]

    def replica(self, span: Span, need_tokens: int, avoid: Collection[str], like: ServerRecord) -> ServerRecord | None:
        """Return another server that could hold a copy of a session over ``span``; None if none is known."""
        servers, _ = self._usable(self._banned() | dict.fromkeys(avoid, FAILED))
        return best_replica(_alike(servers, like), span, self.costs(need_tokens))

    async def server(self, record: ServerRecord) -> ServerConnection:
        """Return an open connection, shared by all callers. Raise PeerUnavailable or BadReply if none can be opened."""
        known = self._servers.get(record.peer_id)
        if known is not None and known.leads_to(record):
            known.renew(record)
            return known
        key = record.peer_id, record.addresses, record.tls_fingerprint
        if key not in self._connecting:
            self._connecting[key] = connecting = self.spawn(self._connected(record))
            connecting.add_done_callback(lambda _: self._connecting.pop(key, None))
        return await result_of(self._connecting[key], record.peer_id)

    async def _connected(self, record: ServerRecord) -> ServerConnection:
        server = await self._connect(record, self.config)
        known = self._servers.get(record.peer_id)
        if known is not None:  # it leads elsewhere, and sessions may still use it
            self._replaced.add(known)
            self.spawn(known.close_when_idle()).add_done_callback(lambda _: self._replaced.discard(known))
        self._servers[record.peer_id] = server
        return server

    async def ask(self, record: ServerRecord) -> ServerRecord | None:
        """Ping the server and return its own current record. If it fails or refuses, leave it out and return None."""
        if await self._rtts.measure_again(record) is None:
            return None
        answer = await self._answer(record, lambda server: server.describe())
        if answer is not None:
            self.served(record.peer_id)
        return answer

    def denial(self, peer_id: str) -> str:
        """Return the error message with which a private swarm's server refused this client; empty if it has not."""
        error = self._denials.get(peer_id)
        return "" if error is None else str(error)

    def relay_of(self, peer_id: str) -> str:
        """Return the peer that relays the traffic to a server; empty if it is reached directly, or not at all."""
        server = self._servers.get(peer_id)
        return "" if server is None else server.relay_id

    def costs(self, need_tokens: int = 0) -> Costs:
        """Return the known costs of servers; servers without a known round trip count as far."""
        return Costs(self._rtts.known, self._rtts.guess_s(False), need_tokens)

    async def _ping(self, record: ServerRecord) -> float | None:
        """Return one round trip in seconds. If the server does not answer, leave it out and return None."""
        return await self._answer(record, lambda server: server.ping())

    async def _answer(self, record: ServerRecord, ask: Callable[[ServerConnection], Awaitable[T]]) -> T | None:
        """Return the server's answer. If it fails or refuses, leave it out and return None."""
        try:
            return await ask(await self.server(record))
        except PeerError as error:
            _logger.info("%s", error)
            self._leave_out(error)
        except AccessDenied as error:
            self._denials[record.peer_id] = error
        return None

    def failed(self, error: PeerError) -> None:
        """Leave the failed server out for a while, longer after each failure, and read the DHT again."""
        if error.peer_id:
            self._leave_out(error)
        self._view_time = float("-inf")
        if not self.closed and not self._reading.is_under_way:
            self.spawn(self._reading.after_now(self._read_view))

    def _leave_out(self, error: PeerError) -> None:
        expires_at = None
        # A dead server's record stays in the DHT until it expires. A newer record shows that the server is back.
        if isinstance(error, PeerUnavailable):
            expires_at = max((s.expires_at for s in self._view.servers if s.peer_id == error.peer_id), default=None)
        self._backoff.add(error.peer_id, now_s(), expires_at)
        self._trust.worked.discard(error.peer_id)
        self.prompts.forget(error.peer_id)
        self.progress.forget(error.peer_id)
        self._rtts.forget(error.peer_id)
        self._servers.pop(error.peer_id, None)  # not closed: other sessions may still use it

    def ban(self, peer_id: str, duration_s: float = float("inf")) -> None:
        """Stop using the server, even if there is no other: it has answered wrongly."""
        self._backoff.ban(peer_id, now_s() + duration_s)

    def is_banned(self, peer_id: str) -> bool:
        return self._backoff.is_banned(peer_id, now_s())

    def need_joins(self) -> None:
        """Use only servers that compute ``BlockInput.joined`` from now on."""
        self.wanted = replace(self.wanted, joins=True)

    async def usable_servers(self) -> Sequence[ServerRecord]:
        """Return the servers that are listed and have not failed recently."""
        await self.view(self.config.view_max_age_s)
        return self._usable(self._banned())[0].servers

    def record_of(self, peer_id: str) -> ServerRecord | None:
        """Return a server's record from the last view, usable or not; None if the view does not have it."""
        return next((server for server in self._view.servers if server.peer_id == peer_id), None)

    async def accusations(self) -> list[tuple[str, pb.Accusations]]:
        """Return the unverified accusations against servers of this model, each with its publisher's peer id."""
        return await self._discovery.accusations(self.model)

    def served(self, peer_id: str) -> None:
        """Reset the backoff of a server that works."""
        self._backoff.reset(peer_id)

    def worked(self, peer_ids: Iterable[str]) -> None:
        """Note that the servers have computed all that this client asked for in one call."""
        self._trust.worked.update(peer_ids)

    def has_worked(self, peer_id: str) -> bool:
        """Return whether the server has computed something for this client since it last failed."""
        return peer_id in self._trust.worked

    def distrust_newcomers(self) -> None:
        """Treat all unproven servers as newcomers for a while: some server has accepted work and done nothing."""
        self._trust.distrust_newcomers(now_s())

    def unproven(self) -> set[str]:
        """Return the servers that have not computed anything for this client."""
        return {server.peer_id for server in self._view.servers} - self._trust.worked

    def is_covered(self, span: Span, avoid: Collection[str]) -> bool:
        """Return whether usable servers hold these blocks, apart from the servers to avoid."""
        servers, _ = self._usable(self._banned() | dict.fromkeys(avoid, FAILED))
        return all(servers.replicas(span.end)[span.start :])

    def can_replace(self, span: Span, peer_id: str) -> bool:
        """Return whether other servers hold the blocks that this server computes."""
        return self.is_covered(span, (peer_id,))

    def to_try(self, span: Span, avoid: Collection[str]) -> list[ServerRecord]:
        """Return unproven servers of some of these blocks: all of them, or a random choice if there are many."""
        servers, _ = self._usable(self._banned() | dict.fromkeys(avoid, FAILED) | dict.fromkeys(self._trust.worked, ""))
        found = [s for s in servers.servers if span.overlaps(s.span)]
        return random.sample(found, min(len(found), _MAX_TRIED))

    def _costs_among(self, servers: SwarmView, optimistic: bool, need_tokens: int = 0, pushes: bool = True) -> Costs:
        """Return the costs among these servers. ``optimistic``: servers without a measured round trip count as
        near."""
        newcomers = Newcomers.among(servers, self._trust.newcomers(now_s()))
        return Costs(self._rtts.known, self._rtts.guess_s(optimistic), need_tokens, pushes, newcomers=newcomers)

    def _usable(self, banned: dict[str, str]) -> tuple[SwarmView, Sequence[str]]:
        """Return the usable servers, and phrases for the others. Failed servers do not use up the limit per address."""
        servers, left_out = usable(self._view, self.wanted, banned, time.time())
        counted = within_addresses(servers.servers, self._trust.worked, self._salt)
        if len(counted) < len(servers.servers):
            num_left_out = len(servers.servers) - len(counted)
            left_out = [*left_out, f"{num_left_out} of those that announce the same address as very many others"]
        return SwarmView(tuple(self.progress.refreshed(server, now_s()) for server in counted)), left_out

    def _banned(self, just_now: bool = False) -> dict[str, str]:
        return self._backoff.now(now_s(), self._view.servers, just_now) | dict.fromkeys(self._denials, DENIED)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run the coroutine until this connection is closed; its error is dropped if no caller awaits it."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


def _choose_kind(choose: Choose, servers: SwarmView, like: ServerRecord | None, optimistic: bool) -> list[Route]:
    if like is not None:
        with contextlib.suppress(NoRoute):
            return choose(_alike(servers, like), optimistic)
    return choose(servers, optimistic)


def _alike(view: SwarmView, like: ServerRecord) -> SwarmView:
    """Return the servers that round numbers as ``like`` does."""
    return SwarmView(tuple(server for server in view.servers if server.kind == like.kind))
