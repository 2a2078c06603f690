"""One model of a swarm as a client sees it: its servers, their round trips, and the chain that the client would use."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any, cast

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop, Route, seconds
from swarm_client.swarm.swarm import Connect, Swarm
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import SwarmError
from swarm_protocol.span import Span, runs_without
from swarm_protocol.wire.constants import WIRE_VERSION

if TYPE_CHECKING:
    from swarm_protocol.dht.dht import Dht

_AT_ONCE = 32  # servers that are asked together
_ANSWER_S = 4.0  # a server that takes longer counts as silent
_LATELY_S = 10.0
_NEED_TOKENS = 64  # the room that the client looks for: a short generation
UNREACHABLE = "unreachable"
MOST = 200  # the most servers that are contacted: each costs a connection


@dataclass(frozen=True)
class ServerStatus:
    """One server.

    Attributes:
        record: the server's own record if it was asked recently, otherwise the DHT's.
        rtt_s: the round trip; None if it has not been measured.
        answers: False if the server was asked and did not answer.
        denial: the error message with which the server refused this client; empty if it did not.
        relay_id: the peer through which the server was reached; empty if it was reached directly.
    """

    record: ServerRecord
    rtt_s: float | None = None
    answers: bool = True
    denial: str = ""
    relay_id: str = ""


@dataclass(frozen=True)
class ModelStatus:
    """One model of a swarm.

    Attributes:
        servers: all servers of the model, first blocks first.
        revision: the model's revision; the client uses no servers of another one. Empty: any revision.
        chain: the chain that the client would take now; empty if there is none. ``no_chain`` may say why.
    """

    model: str
    num_blocks: int
    servers: tuple[ServerStatus, ...]
    revision: str = ""
    chain: Route = ()
    tokens_per_s: float = 0.0
    no_chain: str = ""

    def serves(self, server: ServerStatus) -> bool:
        """Return whether a client can use the server now."""
        record = server.record
        fits = record.revision == (self.revision or record.revision) and record.wire_version == WIRE_VERSION
        return server.answers and fits and record.state is ServerState.ONLINE and not server.denial

    def state_of(self, server: ServerStatus) -> str:
        """Return the record's state, or why it is unusable: unreachable, denied, incompatible, other_revision."""
        if not server.answers:
            return UNREACHABLE
        if server.denial:
            return "denied"
        if server.record.wire_version != WIRE_VERSION:
            return "incompatible"
        if server.record.revision != (self.revision or server.record.revision):
            return "other_revision"
        return server.record.state.name.lower()

    @property
    def replicas(self) -> list[int]:
        """Return, for each block, the number of servers that hold it and that a client can use."""
        return self._replicas([server for server in self.servers if self.serves(server)])

    @property
    def missing(self) -> tuple[Span, ...]:
        """Return the blocks that no server holds. Servers that refuse this client count as holding theirs."""
        held = self._replicas([server for server in self.servers if server.denial or self.serves(server)])
        return runs_without(held)

    @property
    def denied(self) -> tuple[Span, ...]:
        """Return the blocks whose servers all deny this client access."""
        here, gone = self.replicas, {block for span in self.missing for block in span}
        return runs_without([count or block in gone for block, count in enumerate(here)])

    def _replicas(self, servers: Sequence[ServerStatus]) -> list[int]:
        return SwarmView(tuple(server.record for server in servers)).replicas(self.num_blocks)


class ModelMonitor:
    """The monitor of one model: the DHT's records of its servers, and their answers. Runs on the background loop."""

    def __init__(self, config: ClientConfig, model: str, num_blocks: int, connect: Connect) -> None:
        self.num_blocks = num_blocks
        self._config = config
        self._model = model
        self._connect = connect
        self._seen = _Seen()
        self._swarm: Swarm | None = None
        self._answers: dict[str, _Answer] = {}  # keys: peer ids
        self._asking: dict[str, asyncio.Task[Any]] = {}
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._chain: Route = ()
        self._no_chain = ""

    def see(self, view: SwarmView) -> None:
        """Take the DHT's last view. An empty view counts only if no server has answered recently.

        A failed read of the DHT may look like an empty view.
        """
        lately_s = now_s() - _LATELY_S
        if view.servers or not any(answer.record and answer.time_s > lately_s for answer in self._answers.values()):
            self._seen.see(view)
        there = {record.peer_id for record in self._seen.now.servers}
        self._answers = {peer_id: answer for peer_id, answer in self._answers.items() if peer_id in there}

    def status(self) -> ModelStatus:
        """Return the status as it is known now; ``ask`` makes it current."""
        servers = self._servers()
        status = ModelStatus(self._model, self.num_blocks, servers, _prevailing_revision(servers))
        chain = _as_now(self._chain, status)
        if chain and self._swarm is not None:  # the swarm object that found the chain
            tokens_per_s = 1 / seconds(chain, self._swarm.costs())
            return dataclasses.replace(status, chain=chain, tokens_per_s=tokens_per_s)
        return dataclasses.replace(status, no_chain=self._no_chain)

    async def ask(self, most: int, timeout_s: float) -> None:
        """Ask servers for their records, and find the chain again.

        The chain's servers come first, then those that were not asked for longest. Some may not answer within
        ``timeout_s``; their later answers are part of a later status.
        """
        revision = self.status().revision
        swarm = self._swarm
        if swarm is None or swarm.revision != revision:
            swarm = await self._use(revision)
        await swarm.view(0)  # so that the swarm object has the records that ``see`` has got
        for record in self._to_ask(most):
            task = self._asking[record.peer_id] = asyncio.ensure_future(self._ask(swarm, record))
            task.add_done_callback(lambda _, peer_id=record.peer_id: self._asking.pop(peer_id, None))  # type: ignore[misc]
        if self._asking:
            await asyncio.wait(list(self._asking.values()), timeout=timeout_s)
        self._chain, self._no_chain = await self._find_chain(swarm)

    async def close(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()
        if self._swarm is not None:
            await self._swarm.close()

    def _servers(self) -> tuple[ServerStatus, ...]:
        statuses = [self._latest(record) for record in self._seen.now.servers]
        return tuple(
            status
            for status in statuses
            if (status.record.model, status.record.num_blocks) == (self._model, self.num_blocks)
            and status.record.state is not ServerState.OFFLINE
        )

    def _latest(self, record: ServerRecord) -> ServerStatus:
        answer = self._answers.get(record.peer_id)
        if answer is None or answer.asked.tls_fingerprint != record.tls_fingerprint:  # not asked since its start
            return ServerStatus(record)
        if answer.record is None:
            return ServerStatus(record, answers=bool(answer.denial), denial=answer.denial, relay_id=answer.relay_id)
        # The answer is newer than the DHT's record unless that has been renewed since.
        is_newer = answer.asked.expires_at == record.expires_at
        latest = dataclasses.replace(answer.record, expires_at=record.expires_at) if is_newer else record
        return ServerStatus(latest, answer.rtt_s, relay_id=answer.relay_id)

    async def _use(self, revision: str) -> Swarm:
        old, self._chain = self._swarm, ()
        dht = cast("Dht", self._seen)  # ``_Seen`` has all that a client uses of a Dht
        swarm = self._swarm = Swarm(
            self._config, self._model, revision, self.num_blocks, dht=dht, connect=self._connect
        )
        if old is not None:
            await old.close()
        return swarm

    def _to_ask(self, most: int) -> list[ServerRecord]:
        """Return the servers to ask. A joining server is not asked, because it does not listen yet."""
        servers = [server for server in self._seen.now.servers if server.state is not ServerState.JOINING]
        new = [server for server in servers if server.peer_id not in self._answers]
        room = MOST - len(self._answers)
        # Servers are sorted by their blocks, so equal steps through the list reach servers of all blocks.
        some = {server.peer_id for server in new[:: ceil(len(new) / room)]} if new and room > 0 else set()
        on_chain = {hop.server.peer_id for hop in self._chain}
        wanted = on_chain | self._answers.keys() | some
        found = [server for server in servers if server.peer_id in wanted and server.peer_id not in self._asking]
        return sorted(found, key=lambda server: (server.peer_id not in on_chain, self._asked_s(server)))[:most]

    def _asked_s(self, server: ServerRecord) -> float:
        answer = self._answers.get(server.peer_id)
        return -inf if answer is None else answer.time_s

    async def _ask(self, swarm: Swarm, record: ServerRecord) -> None:
        async with self._limit:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    answer = await swarm.ask(record)
            except TimeoutError:
                answer = None
        rtt_s = swarm.costs().rtts_s.get(record.peer_id)
        denial = "" if answer is not None else swarm.denial(record.peer_id)
        self._answers[record.peer_id] = _Answer(record, answer, rtt_s, now_s(), denial, swarm.relay_of(record.peer_id))

    async def _find_chain(self, swarm: Swarm) -> tuple[Route, str]:
        """Return the chain, or the reason why there is none; the reason is empty if blocks are missing or denied."""
        status = self.status()
        if status.missing or status.denied:
            return (), ""
        silent = [peer_id for peer_id, answer in self._answers.items() if answer.record is None]
        try:
            chain = await swarm.chain(Span(0, self.num_blocks), _NEED_TOKENS, avoid=silent, timeout_s=0)
        except SwarmError as error:  # no chain, or the model's monitor was closed
            return (), str(error)
        return chain, ""


@dataclass(frozen=True)
class _Answer:
    """A server's answer when it was asked: its record, the reason of its refusal, or nothing."""

    asked: ServerRecord  # the DHT's record at that time
    record: ServerRecord | None
    rtt_s: float | None
    time_s: float
    denial: str
    relay_id: str


class _Seen:
    """A stand-in for the DHT in a ``Swarm``, with the view that was read last."""

    is_alive, is_alone = True, False  # the reader of the DHT takes care of both

    def __init__(self) -> None:
        self.now = SwarmView()

    def see(self, view: SwarmView) -> None:
        self.now = view

    async def view(self, *_which: object) -> SwarmView:
        return self.now

    async def shutdown(self) -> None:
        pass


def _prevailing_revision(servers: Sequence[ServerStatus]) -> str:
    """Return the revision of most servers that are online, or of most servers if none is online."""
    online = [s.record.revision for s in servers if s.answers and s.record.state is ServerState.ONLINE]
    counts = Counter(online or [server.record.revision for server in servers])
    return max(counts, key=lambda revision: (counts[revision], revision), default="")


def _as_now(chain: Route, status: ModelStatus) -> Route:
    """Return the chain with current records; empty if one server cannot do its part any more."""
    usable = {server.record.peer_id: server.record for server in status.servers if status.serves(server)}
    hops = [Hop(usable[hop.server.peer_id], hop.span) for hop in chain if hop.server.peer_id in usable]
    whole = len(hops) == len(chain) and all(hop.server.span.covers(hop.span) for hop in hops)
    return tuple(hops) if whole else ()
