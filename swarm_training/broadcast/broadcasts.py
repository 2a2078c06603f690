"""The broadcast of a peer's statements, the relay of new statements of other peers, and the agreements on phases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from swarm_protocol.net.identity import Identity
from swarm_training.broadcast.agreement import Agreement
from swarm_training.broadcast.outbox import BroadcastOutbox
from swarm_training.broadcast.signed import SignedStatement, endorse, endorsers_of
from swarm_training.broadcast.wire import StatementSlot
from swarm_training.core.robust_network import RobustNetwork
from swarm_training.pb import training_robust_pb2 as pb

_VOTE = "vote on "


class Broadcasts:
    """The broadcasts of one session, on one event loop.

    Attributes:
        peers: ids of all participants, including this peer.
    """

    def __init__(self, identity: Identity, session: bytes, network: RobustNetwork, changed: Callable[[], None]) -> None:
        """Start without peers. ``changed`` is called when a statement has been accepted."""
        self.session = session
        self.peers: frozenset[str] = frozenset()
        self._identity = identity
        self._network = network
        self._changed = changed
        self._agreements: dict[StatementSlot, Agreement] = {}
        self._taken: dict[bytes, int] = {}  # digests of statements, and their steps
        self._outboxes: dict[str, BroadcastOutbox] = {}
        self._finishing: list[BroadcastOutbox] = []  # of peers that take part no more
        self._step = self._attempt = 0

    def at(self, step: int, attempt: int) -> None:
        """Set the step and the attempt of this peer, and forget older statements."""
        if step != self._step:
            self._agreements = {place: each for place, each in self._agreements.items() if place.step >= step}
            self._taken = {digest: each for digest, each in self._taken.items() if each >= step}
        self._step, self._attempt = step, attempt

    def set_peers(self, peers: Collection[str]) -> None:
        self.peers = frozenset(peers)
        for gone in self._outboxes.keys() - self.peers:
            outbox = self._outboxes.pop(gone)
            outbox.finish()
            self._finishing.append(outbox)

    def agreement(self, place: StatementSlot) -> Agreement:
        if place not in self._agreements:
            self._agreements[place] = Agreement(place.kind)
        return self._agreements[place]

    def agreements_of(self, step: int, attempt: int) -> list[Agreement]:
        return [each for place, each in self._agreements.items() if (place.step, place.attempt) == (step, attempt)]

    def say(self, said: pb.Said) -> SignedStatement:
        """Sign a statement, and broadcast it to all peers, including this one."""
        said.session = self.session
        statement = SignedStatement.make(said, self._identity)
        self.take(statement, (), self._identity.peer_id)
        return statement

    def is_expected(self, statement: SignedStatement) -> bool:
        """Return whether this peer can take the statement and has not done so. Raise ValueError if it is invalid."""
        if statement.digest in self._taken:
            return False
        said, place = statement.said, statement.place
        is_here = place.step == self._step and place.attempt <= self._attempt + 1
        is_next = place.step == self._step + 1 and place.attempt == 0
        return said.session == self.session and (is_here or is_next) and statement.sender in self.peers

    def take(self, statement: SignedStatement, endorsements: Iterable[pb.Endorsement], teller: str) -> None:
        """Take a statement that ``is_expected``, and relay it if it counts."""
        agreement, now = self._of(statement.place), asyncio.get_running_loop().time()
        endorsers = endorsers_of(statement, endorsements)
        if not agreement.take(statement, endorsers, now):
            return
        self._taken[statement.digest] = statement.place.step
        if agreement.needs_endorsement(now) and statement.sender != self._identity.peer_id:
            endorsers[self._identity.peer_id] = endorse(statement, self._identity)
        message = statement.to_proto(endorsers.values())
        for peer_id in self.peers - {teller, statement.sender, self._identity.peer_id}:
            self._outbox(peer_id).put(message)
        self._changed()

    def close(self) -> None:
        self.peers = frozenset()
        for outbox in (*self._outboxes.values(), *self._finishing):
            outbox.close()

    def _of(self, place: StatementSlot) -> Agreement:
        return self.agreement(StatementSlot(place.step, place.attempt, place.kind.removeprefix(_VOTE)))

    def _outbox(self, peer_id: str) -> BroadcastOutbox:
        if peer_id not in self._outboxes:
            self._outboxes[peer_id] = BroadcastOutbox(lambda request: self._network.tell(peer_id, request))
        return self._outboxes[peer_id]
