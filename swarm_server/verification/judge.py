"""Judgement of other servers' answers over the blocks hosted here, and publication of the evidence."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from swarm_protocol.dht.notices.accusations import AccusationRegistry
from swarm_protocol.dht.records import ServerRecord, short_id
from swarm_protocol.errors import RequestRejected, SwarmError
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.verification.comparison import RoundingKind
from swarm_protocol.verification.evidence import Evidence
from swarm_protocol.verification.statements import SKETCH_POSITIONS
from swarm_protocol.wire.constants import MAX_NAME_CHARS
from swarm_protocol.wire.printable import printable
from swarm_server.sessions.services import SpanServices
from swarm_server.verification.blocklist import Blocklist
from swarm_server.verification.doubts import Doubts

_MAX_KNOWN = 4096  # judged accusations to remember
_MAX_READ = 8  # accusations of others to judge at a time
_logger = logging.getLogger(__name__)


class AnswerJudge:
    """One server's judgement of other servers' answers. It trusts only results that it has computed itself."""

    def __init__(
        self,
        services: Callable[[], SpanServices | None],
        record: Callable[[], ServerRecord],
        routed: bool,
        accusations: AccusationRegistry,
        token: bytes,
        blocklist: Blocklist,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a judge.

        Args:
            services: returns the services of the blocks hosted at present.
            routed: whether the model's blocks choose among experts.
            token: the token of a member of a private swarm.
            blocklist: the list to which servers with proven wrong answers are added.
            clock: returns Unix time in seconds.
        """
        self._services = services
        self._record = record
        self._routed = routed
        self._accusations = accusations
        self._token = token
        self._clock = clock
        self._blocklist = blocklist
        self._doubts = Doubts(clock)
        self._publishing: asyncio.Task[None] | None = None
        self._known: OrderedDict[bytes, bool] = OrderedDict()  # digests of judged evidence, and the verdicts

    async def judge(self, message: pb.Evidence, client: Caller) -> bool:
        """Return whether the evidence shows a wrong answer of a server; the computation counts as work for ``client``.

        Raises:
            RequestRejected: the message is not valid evidence, or is about other blocks than those hosted here.
            PeerBusy: too much work waits.
        """
        key = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        if key in self._known:
            return self._known[key]
        try:
            evidence = await asyncio.to_thread(Evidence.parse, message, self._clock())
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        if evidence.statement.peer_id in self._blocklist:
            return True
        shown = await self._is_shown(evidence, client)
        self._known[key] = shown
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        if shown:
            statement = evidence.statement
            _logger.warning("server %s answers wrongly over blocks %s", short_id(statement.peer_id), statement.span)
            self._blocklist.add(evidence)
            if self._publishing is None or self._publishing.done():  # else it is published later
                self._publishing = asyncio.ensure_future(self.publish())
        return shown

    async def doubt(self, peer_id: str, client: Caller) -> None:
        """Publish for a while that the client doubts a server.

        Raises:
            RequestRejected: the peer is not another server of this swarm, or no blocks are hosted at present.
        """
        services = self._services()
        if services is None:
            raise RequestRejected("this server hosts no blocks at present")
        await self._check_accused(peer_id, services)
        self._doubts.add(peer_id, client)

    async def judge_others(self) -> None:
        """Judge some of the evidence that other servers have published."""
        own, published = self._record().peer_id, await self._accusations.read()
        others = [found for publisher, said in published if publisher != own for found in said.evidence]
        # The choice is random, so that a server with much evidence cannot keep that of others from being judged.
        for message in random.sample(others, min(len(others), _MAX_READ)):
            try:
                await self.judge(message, Caller(own))
            except SwarmError as error:
                _logger.debug("an accusation was not judged: %s", printable(str(error)))
        if self._publishing is not None:
            await asyncio.wait([self._publishing])

    async def publish(self) -> None:
        """Publish unexpired evidence that this server has verified, and the servers that its clients doubt."""
        messages, doubted = self._blocklist.evidence(), self._doubts.doubted()
        if (messages or doubted) and not await self._accusations.publish(messages, doubted, self._token):
            _logger.info("the swarm did not take this server's accusations; trying again later")

    async def _is_shown(self, evidence: Evidence, client: Caller) -> bool:
        """Compute the outputs and compare. Raise RequestRejected if the evidence is not about the hosted blocks."""
        services, own, statement = self._services(), self._record(), evidence.statement
        if services is None or not (own.span.start <= statement.span.start and statement.span.end <= own.span.end):
            raise RequestRejected("evidence is about other blocks than this server hosts")
        if (statement.model, statement.revision) != (own.model, own.revision):
            raise RequestRejected("evidence is about another model than this server hosts")
        if evidence.inputs.hidden.shape[-1] != services.engine.hidden_size:
            raise RequestRejected("evidence is about hidden states of another size than the model's")
        await self._check_accused(statement.peer_id, services)
        compute = partial(services.engine.stateless.forward, statement.span, evidence.inputs)
        output = await services.scheduler.train(compute, client, SKETCH_POSITIONS)
        excess = evidence.excess(output[0], RoundingKind(*own.kind), self._routed)
        return excess is not None and excess >= 1

    async def _check_accused(self, peer_id: str, services: SpanServices) -> None:
        """Raise RequestRejected if the accused is this server, or not a server of this swarm."""
        if peer_id == self._record().peer_id:
            raise RequestRejected("evidence is about this server itself")
        if len(peer_id) > MAX_NAME_CHARS or not await services.neighbours.knows(peer_id):  # may take seconds
            raise RequestRejected("evidence is about a peer that is no server of this swarm")
