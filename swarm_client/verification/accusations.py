"""Accusations of servers that answer wrongly: how a client publishes its own, and how it verifies those of others.

A client asks the server again with inputs derived from a seed, and has the server sign the answer. Other servers of the
same blocks repeat the computation, and publish the evidence if their results differ. Nobody has to be trusted: each
reader of the evidence has further servers repeat the computation, and believes what more of them say.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from swarm_client.routing.routing import Hop
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.wire_tensor import WireTensor
from swarm_client.verification.references import kind_of, witnesses
from swarm_protocol.dht.records import ServerRecord, short_id
from swarm_protocol.errors import PeerError, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.evidence import Evidence, Expired, new_seed, probe
from swarm_protocol.wire.block_input import BlockInput

_JUDGES = 3  # servers that are asked to judge a liar, or informed of a doubt
_ATTEMPTS = 32  # tries per judge to get a lie signed: enough for most servers that lie in a tenth of answers
_QUESTIONS = 4  # different probes among all attempts
_MAX_WITNESSES = 4  # servers that are asked beside the accuser
_LEAD = 2  # so many more witnesses on one side decide: one that lies for its owner decides nothing
_CLEAR = 0.5  # excess below which an honest server that rounds alike is unlikely to have found a lie
_MAX_READ = 4  # accusations that are verified at each reading
_MOST_TRIES = 3  # readings at which an accusation is verified, if the witnesses do not decide it
_MAX_KNOWN = 4096
_READ_EVERY_S = 60.0  # searching for a key without entries asks many nodes
_logger = logging.getLogger(__name__)


class AccusationClient:
    """The accusations of one client. All methods run on the background loop."""

    def __init__(self, swarm: Swarm, on_doubt: Callable[[str], None] = lambda _: None) -> None:
        """Keep ``on_doubt``, which gets the peer ids of servers that other clients doubt, or witnesses disagree on."""
        self._swarm = swarm
        self._on_doubt = on_doubt
        self._chance = random.SystemRandom()
        self._tries: Counter[bytes] = Counter()  # by digest of the accusation; ``_MOST_TRIES``: it is decided
        self._slanderers: set[str] = set()  # publishers of false accusations

    async def tell(self, liar: str, span: Span, hidden_size: int) -> bool:
        """Accuse a liar over ``span`` before other servers. Return whether one of them confirms the accusation.

        If none does, inform some servers of the doubt.
        """
        record = self._swarm.record_of(liar)
        if record is None:
            return False
        shown = not self._swarm.traits.routed and await self._show(record, span, hidden_size)  # see ``Evidence.excess``
        if not shown:
            await self.doubt(liar)
        return shown

    async def doubt(self, peer_id: str) -> None:
        """Inform some servers that this client doubts another, so that other clients check it sooner."""
        servers = [server for server in await self._swarm.usable_servers() if server.peer_id != peer_id]
        for server in self._chance.sample(servers, min(_JUDGES, len(servers))):
            try:
                await (await self._swarm.server(server)).doubt(peer_id)
            except SwarmError as error:
                _logger.info("server %s did not take a doubt: %s", server.short_id, error)

    async def _show(self, record: ServerRecord, span: Span, hidden_size: int) -> bool:
        """Show evidence to servers that hold some of the blocks. Return whether one of them confirms it."""
        liar = record.peer_id
        servers = [server for server in await self._swarm.usable_servers() if server.peer_id != liar]
        judges = [server for server in servers if _overlap(server.span, span) is not None]
        self._chance.shuffle(judges)  # sorting keeps this order among judges that round as the liar does, and others
        judges.sort(key=lambda server: kind_of(server) != kind_of(record))
        shown = False
        for judge in judges[:_JUDGES]:
            part = _overlap(judge.span, span)
            assert part is not None
            try:
                evidence = await self._false_statement(record, Hop(judge, part), hidden_size)
                if evidence is not None:
                    shown |= await (await self._swarm.server(judge)).accuse(evidence.message)
            except (SwarmError, ValueError) as error:
                _logger.info("server %s was not accused before %s: %s", record.short_id, judge.short_id, error)
        return shown

    async def _false_statement(self, record: ServerRecord, judge: Hop, hidden_size: int) -> Evidence | None:
        """Return a signed statement that the judge's answer contradicts; None if all attempts fail.

        Many attempts are needed, because a server that lies now and then mostly signs the truth. The judge answers each
        probe once, and only the liar computes again in each attempt.
        """
        for _ in range(_QUESTIONS):  # a server may answer some probes rightly and others wrongly
            seed = new_seed()
            right = await self._answer(judge, probe(seed, hidden_size))
            if right is None:
                return None
            for _ in range(_ATTEMPTS // _QUESTIONS):
                evidence = await self._evidence(record, judge.span, seed, hidden_size)
                excess = evidence.excess(right, kind_of(judge.server), self._swarm.traits.routed)
                if excess is not None and excess >= 1:
                    return evidence
        return None

    async def read(self) -> None:
        """Ban accused servers if further servers confirm the evidence; report doubted servers to ``on_doubt``."""
        published = [each for each in await self._swarm.accusations() if each[0] not in self._slanderers]
        for peer_id in {peer_id for _, said in published for peer_id in said.doubted}:
            if self._swarm.record_of(peer_id) is not None:
                self._on_doubt(peer_id)
        accusations = [(publisher, evidence) for publisher, said in published for evidence in said.evidence]
        self._chance.shuffle(accusations)
        num_left = _MAX_READ
        for publisher, message in accusations:
            key = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
            if num_left and self._tries[key] < _MOST_TRIES and publisher not in self._slanderers:
                num_left -= 1
                await self._try(key, publisher, message)

    async def _try(self, key: bytes, publisher: str, message: pb.Evidence) -> None:
        """Try to decide about an accusation, and count the try. Once decided, the accusation is not tried again."""
        if len(self._tries) > _MAX_KNOWN:  # anybody may publish accusations; to verify some again does no harm
            self._tries.clear()
        self._tries[key] += 1
        evidence = await self._parsed(message, publisher)
        if evidence is None or await self._is_decided(evidence, publisher):
            self._tries[key] = _MOST_TRIES

    async def _parsed(self, message: pb.Evidence, publisher: str) -> Evidence | None:
        """Return the evidence; None if it is too old or invalid. A publisher of invalid evidence is ignored later."""
        try:
            return await asyncio.to_thread(Evidence.parse, message, time.time())  # it verifies a signature
        except Expired:
            pass
        except ValueError as error:
            self._slanderers.add(publisher)
            _logger.info("server %s has published no evidence: %s", short_id(publisher), error)
        return None

    async def keep_reading(self) -> None:
        """Read accusations regularly while there are sessions."""
        while not self._swarm.closed:
            if self._swarm.sessions:
                await self.read()
            await asyncio.sleep(_READ_EVERY_S)

    async def _evidence(self, record: ServerRecord, span: Span, seed: bytes, hidden_size: int) -> Evidence:
        """Return what the server signs now. Raise PeerError, or ValueError if it signs nothing of use."""
        inputs = probe(seed, hidden_size)
        connection = await self._swarm.server(record)
        _, statement = await connection.stated(span, inputs, WireTensor.of(inputs.hidden))
        return Evidence.of(statement, seed, hidden_size, time.time())

    async def _is_decided(self, evidence: Evidence, publisher: str) -> bool:
        """Judge the evidence. Return whether it is decided; if not, the witnesses of a later reading may decide it.

        The accused need not be there, since it has signed what is judged: a liar could otherwise leave while clients
        read. If the witnesses contradict one another, nobody is blamed, and the accused is doubted.
        """
        if not self._concerns(evidence):
            return True
        statement, swarm = evidence.statement, self._swarm
        servers = {
            server.peer_id: server
            for server in await swarm.usable_servers()
            if _overlap(server.span, statement.span) == statement.span and server.peer_id != statement.peer_id
        }
        accuser = servers.pop(publisher, None)
        judged = filter(None, (swarm.record_of(statement.peer_id), swarm.record_of(publisher)))
        votes = await self._votes(evidence, witnesses(servers.values(), statement.kind, judged, self._chance))
        if votes.lead >= _LEAD or (votes.is_one_alone and accuser is not None):  # of three servers, two decide
            _logger.warning(
                "server %s has answered wrongly over blocks %s, as %s has shown: it is not used any more",
                short_id(statement.peer_id),
                statement.span,
                short_id(publisher),
            )
            swarm.ban(statement.peer_id)
            return True
        if votes.lead <= -_LEAD:
            if votes.refuting - votes.contradicting >= _LEAD:
                self._slanderers.add(publisher)
            return True
        if votes.contradicting:
            self._on_doubt(statement.peer_id)
        return False

    def _concerns(self, evidence: Evidence) -> bool:
        """Return whether the evidence is about blocks of this client's model, and about a server that is not banned."""
        statement, swarm = evidence.statement, self._swarm
        if swarm.is_banned(statement.peer_id) or swarm.traits.routed:  # see ``Evidence.excess``
            return False
        hidden_size = evidence.inputs.hidden.shape[-1]  # a stranger may have made megabytes of it
        is_ours = (statement.model, statement.revision) == (swarm.model, swarm.revision)
        return is_ours and hidden_size == swarm.traits.hidden_size

    async def _votes(self, evidence: Evidence, servers: Iterator[ServerRecord]) -> _Votes:
        """Return the votes of the first witnesses; no more are asked once those on one side lead."""
        statement, votes = evidence.statement, _Votes()
        for server in islice(servers, _MAX_WITNESSES):
            output = await self._answer(Hop(server, statement.span), evidence.inputs)
            excess = None if output is None else evidence.excess(output, kind_of(server), self._swarm.traits.routed)
            if excess is not None:
                votes.add(excess, kind_of(server) == statement.kind)
            if abs(votes.lead) >= _LEAD:
                break
        return votes

    async def _answer(self, hop: Hop, inputs: BlockInput) -> torch.Tensor | None:
        """Return the server's answer, [positions, hidden_size]; None if the server fails."""
        try:
            server = await self._swarm.server(hop.server)
            output, _ = await server.stated(hop.span, inputs, WireTensor.of(inputs.hidden))
            return output.decode(inputs.hidden.shape, inputs.hidden.dtype)[0]
        except PeerError as error:
            error.name_server(hop.server.peer_id)
            self._swarm.failed(error)
        except SwarmError as error:
            _logger.info("an accusation was not checked: %s", error)
        return None


@dataclass
class _Votes:
    """The votes of witnesses about a statement: the numbers of those that contradict and confirm it.

    Attributes:
        refuting: how many of the confirming witnesses show that the accuser is unlikely to have found a lie.
    """

    contradicting: int = 0
    confirming: int = 0
    refuting: int = 0

    def add(self, excess: float, is_alike: bool) -> None:
        """Count a witness. ``excess``: see ``Evidence.excess``; ``is_alike``: it rounds as the accused does.

        Other witnesses are compared within wider bounds, in which a lie that the accuser has found may be hidden.
        """
        self.contradicting += excess >= 1
        self.confirming += excess < 1
        self.refuting += is_alike and excess < _CLEAR

    @property
    def lead(self) -> int:
        """Return how many more witnesses contradict the statement than confirm it."""
        return self.contradicting - self.confirming

    @property
    def is_one_alone(self) -> bool:
        """Return whether a single witness has answered, and contradicts the statement."""
        return (self.contradicting, self.confirming) == (1, 0)


def _overlap(one: Span, other: Span) -> Span | None:
    start, end = max(one.start, other.start), min(one.end, other.end)
    return Span(start, end) if start < end else None
