"""One model of a swarm as a client sees it: who answers, how far they are, and the chain that it would take."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import TYPE_CHECKING, Any, cast

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop, Route, seconds
from swarm_client.swarm.swarm import Connect, Swarm
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView, missing_spans
from swarm_protocol.errors import SwarmError
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import WIRE_VERSION

if TYPE_CHECKING:
    from swarm_protocol.dht.dht import Dht

_AT_ONCE = 32  # servers that are asked together
_ANSWER_S = 4.0  # after so long a server does not answer
_LATELY_S = 10.0
_NEED_TOKENS = 64  # room that the client looks for: a short generation
UNREACHABLE = "unreachable"
MOST = 200  # servers that are spoken to: each costs a connection


@dataclass(frozen=True)
class ServerStatus:
    """One server.

    Attributes:
        record: as the server itself gave it if it was asked lately, else as the DHT has it.
        rtt_s: None if it has not been measured.
        answers: False if it was asked and did not answer.
        denial: what it answered if it does not let this client in.
        relay_id: the peer through which it was reached; empty if it was reached directly.
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
        servers: all of them, first blocks first.
        revision: of the model; the client uses no servers of another. Empty: any.
        chain: the one that it would take now; empty if there is none, and ``no_chain`` may say why.
        tokens_per_s: to expect of the chain.
    """

    model: str
    num_blocks: int
    servers: tuple[ServerStatus, ...]
    revision: str = ""
    chain: Route = ()
    tokens_per_s: float = 0.0
    no_chain: str = ""

    def serves(self, server: ServerStatus) -> bool:
        """Whether a client can use it now."""
        record = server.record
        fits = record.revision == (self.revision or record.revision) and record.wire_version == WIRE_VERSION
        return server.answers and fits and record.state is ServerState.ONLINE and not server.denial

    def state_of(self, server: ServerStatus) -> str:
        """That of the record, or why a client cannot use it: unreachable, denied, incompatible, other_revision."""
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
        """For every block, how many servers hold it that a client can use."""
        return self._replicas([server for server in self.servers if self.serves(server)])

    @property
    def missing(self) -> tuple[Span, ...]:
        """Blocks that no server holds, whether it lets this client in or not."""
        held = self._replicas([server for server in self.servers if server.denial or self.serves(server)])
        return missing_spans(held)

    @property
    def denied(self) -> tuple[Span, ...]:
        """Blocks of which all servers deny this client access."""
        here, gone = self.replicas, {block for span in self.missing for block in span}
        return missing_spans([count or block in gone for block, count in enumerate(here)])

    def _replicas(self, servers: Sequence[ServerStatus]) -> list[int]:
        return SwarmView(tuple(server.record for server in servers)).replicas(self.num_blocks)


class ModelMonitor:
    """What the DHT says of a model's servers, and what they say themselves. Runs on the background loop."""

    def __init__(self, config: ClientConfig, model: str, num_blocks: int, connect: Connect) -> None:
        self.num_blocks = num_blocks
        self._config = config
        self._model = model
        self._connect = connect
        self._seen = _Seen()
        self._swarm: Swarm | None = None
        self._answers: dict[str, _Answer] = {}  # by peer id
        self._asking: dict[str, asyncio.Task[Any]] = {}
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._chain: Route = ()
        self._no_chain = ""

    def see(self, view: SwarmView) -> None:
        """What was read last. That there is nobody is believed if nobody has answered lately: reading may fail."""
        lately_s = now_s() - _LATELY_S
        if view.servers or not any(answer.record and answer.time_s > lately_s for answer in self._answers.values()):
            self._seen.now = view
        there = {record.peer_id for record in self._seen.now.servers}
        self._answers = {peer_id: answer for peer_id, answer in self._answers.items() if peer_id in there}

    def status(self) -> ModelStatus:
        """As of now; ``ask`` makes it fresh."""
        servers = self._servers()
        status = ModelStatus(self._model, self.num_blocks, servers, _prevailing_revision(servers))
        chain = _as_now(self._chain, status)
        if chain and self._swarm is not None:  # which has found the chain
            tokens_per_s = 1 / seconds(chain, self._swarm.costs())
            return dataclasses.replace(status, chain=chain, tokens_per_s=tokens_per_s)
        return dataclasses.replace(status, no_chain=self._no_chain)

    async def ask(self, most: int, timeout_s: float) -> None:
        """Asks servers how they are, the chain's first and then those asked longest ago, and finds the chain again.

        Some may not have answered after ``timeout_s``; what they say later is in a later status.
        """
        revision = self.status().revision
        swarm = self._swarm
        if swarm is None or swarm.revision != revision:
            swarm = await self._use(revision)
        await swarm.view(0)
        for record in self._to_ask(most):
            task = self._asking[record.peer_id] = asyncio.ensure_future(self._ask(swarm, record))
            task.add_done_callback(partial(self._asked, record.peer_id))
        if self._asking:
            await asyncio.wait(list(self._asking.values()), timeout=timeout_s)
        self._chain, self._no_chain = await self._find_chain(swarm)

    def _asked(self, peer_id: str, _task: asyncio.Task[None]) -> None:
        self._asking.pop(peer_id, None)

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
        if answer is None or answer.asked.tls_fingerprint != record.tls_fingerprint:  # not since it was started
            return ServerStatus(record)
        if answer.record is None:
            return ServerStatus(record, answers=bool(answer.denial), denial=answer.denial, relay_id=answer.relay_id)
        is_newer = answer.asked.expires_at == record.expires_at
        latest = dataclasses.replace(answer.record, expires_at=record.expires_at) if is_newer else record
        return ServerStatus(latest, answer.rtt_s, relay_id=answer.relay_id)

    async def _use(self, revision: str) -> Swarm:
        old, self._chain = self._swarm, ()
        dht = cast("Dht", self._seen)  # as far as a client asks it
        swarm = self._swarm = Swarm(
            self._config, self._model, revision, self.num_blocks, dht=dht, connect=self._connect
        )
        if old is not None:
            await old.close()
        return swarm

    def _to_ask(self, most: int) -> list[ServerRecord]:
        """A server that joins does not listen yet."""
        servers = [server for server in self._seen.now.servers if server.state is not ServerState.JOINING]
        new = [server for server in servers if server.peer_id not in self._answers]
        room = MOST - len(self._answers)
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
                answer = await asyncio.wait_for(swarm.ask(record), _ANSWER_S)
            except TimeoutError:
                answer = None
        rtt_s = swarm.costs().rtts_s.get(record.peer_id)
        denial = "" if answer is not None else swarm.denial(record.peer_id)
        self._answers[record.peer_id] = _Answer(record, answer, rtt_s, now_s(), denial, swarm.relay_of(record.peer_id))

    async def _find_chain(self, swarm: Swarm) -> tuple[Route, str]:
        """The chain, or why there is none; blocks that are missing or denied say enough."""
        status = self.status()
        if status.missing or status.denied:
            return (), ""
        silent = [peer_id for peer_id, answer in self._answers.items() if answer.record is None]
        try:
            chain = await swarm.chain(Span(0, self.num_blocks), _NEED_TOKENS, avoid=silent, timeout_s=0)
        except SwarmError as error:  # no chain, or this model is no longer looked at
            return (), str(error)
        return chain, ""


@dataclass(frozen=True)
class _Answer:
    """What a server said when it was asked: its record, why it does not let this client in, or nothing."""

    asked: ServerRecord  # the DHT's record at that time
    record: ServerRecord | None
    rtt_s: float | None
    time_s: float
    denial: str
    relay_id: str


class _Seen:
    """The DHT for a ``Swarm``: what was read last."""

    is_alive, is_alone = True, False  # who reads the DHT sees to it

    def __init__(self) -> None:
        self.now = SwarmView()

    async def view(self, *_which: object) -> SwarmView:
        return self.now

    async def shutdown(self) -> None:
        pass


def _prevailing_revision(servers: Sequence[ServerStatus]) -> str:
    """The one of most servers that are online."""
    online = [s.record.revision for s in servers if s.answers and s.record.state is ServerState.ONLINE]
    counts = Counter(online or [server.record.revision for server in servers])
    return max(counts, key=lambda revision: (counts[revision], revision), default="")


def _as_now(chain: Route, status: ModelStatus) -> Route:
    """The chain with its servers as they are now; empty if one cannot do its part any more."""
    usable = {server.record.peer_id: server.record for server in status.servers if status.serves(server)}
    hops = [Hop(usable[hop.server.peer_id], hop.span) for hop in chain if hop.server.peer_id in usable]
    whole = len(hops) == len(chain) and all(hop.server.span.covers(hop.span) for hop in hops)
    return tuple(hops) if whole else ()
