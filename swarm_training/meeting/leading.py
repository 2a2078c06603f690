"""The I/O of leading meetings: carries out the decisions of ``Leader`` over the streams of the members."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary

from swarm_protocol.errors import PeerUnavailable, RequestRejected
from swarm_protocol.process.routine import end_tasks
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.network import MessageStream
from swarm_training.core.record import Progress
from swarm_training.ledger.crediting import Crediting
from swarm_training.meeting.leader import Leader, LeaderContext, MeetingState, Replies
from swarm_training.pb import training_pb2 as pb

MemberStream = MessageStream[pb.MeetReply, pb.MeetRequest]
_ALIVE = pb.MeetReply(alive=pb.Alive())
_logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Leading:
    """The meetings that one peer leads. One of them gathers members while earlier ones may still average."""

    _run: str
    _peer_id: str
    _context: Callable[[], LeaderContext]
    _note: Callable[[pb.SignedProgress], Progress]  # stores a record and returns its content, or raises ValueError
    _referral: Callable[[pb.Join], pb.Dismissal | None]  # to another leader; None: this peer leads
    _config: TrainingConfig
    _crediting: Crediting
    _numbers: Iterator[int] = field(default_factory=count)
    _gathering: Leader | None = None
    _ticked_s: WeakKeyDictionary[Leader, float] = field(default_factory=WeakKeyDictionary)  # the time of the last tick
    _outboxes: dict[tuple[Leader, str], asyncio.Queue[pb.MeetReply | None]] = field(default_factory=dict)

    async def serve(self, peer_id: str, stream: MemberStream) -> None:
        """Serve one member, from its joining to the end of the meeting. Raise RequestRejected if the caller does not
        join, joins as another peer, contradicts its record, or sends bytes that are no message; TimeoutError if it
        sends nothing."""
        async with asyncio.timeout(self._config.silence_s):
            first = await stream.receive()
        if first is None or first.WhichOneof("kind") != "join":
            raise RequestRejected("a stream to a leader must begin with `join`")
        join = first.join
        record = self._note(join.own)
        if record.peer_id != peer_id:
            raise RequestRejected("the record of progress is that of another peer")
        if record.counts_exactly and join.samples != record.samples:
            raise RequestRejected("the caller joins with other micro-batches than its record says")
        referral = self._referral(join)
        if referral is not None:
            await stream.send(pb.MeetReply(dismissal=referral))
            return
        self._crediting.check(peer_id, join)
        leader = self._leader_at(Moment(join.rollbacks, join.step))
        outbox: asyncio.Queue[pb.MeetReply | None] = asyncio.Queue()
        self._outboxes[leader, peer_id] = outbox
        leader.join(peer_id, join, record, _now())
        self._ticked_s.pop(leader, None)  # tick now: this member may complete the group
        writing = asyncio.create_task(self._write(stream, outbox))
        reading = asyncio.create_task(self._read(leader, peer_id, stream))
        ticking = asyncio.create_task(self._tick(leader))
        try:
            done, _ = await asyncio.wait([writing, reading], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            await end_tasks([writing, reading, ticking])
            if self._outboxes.get((leader, peer_id)) is outbox:  # the peer has not joined again by another stream
                del self._outboxes[leader, peer_id]
                self._deliver(leader, leader.leave(peer_id, self._context(), _now()))

    def _leader_at(self, moment: Moment) -> Leader:
        gathering = self._gathering
        if gathering is None or gathering.moment != moment or gathering.stage is not MeetingState.GATHERING:
            name = f"{self._run}/{moment}/{self._peer_id}/{next(self._numbers)}"
            self._gathering = gathering = Leader(self._run, moment, name, self._crediting.countersign)
        return gathering

    async def _write(self, stream: MemberStream, outbox: asyncio.Queue[pb.MeetReply | None]) -> None:
        with suppress(PeerUnavailable):
            while True:
                try:
                    async with asyncio.timeout(self._config.heartbeat_s):
                        reply = await outbox.get()
                except TimeoutError:
                    reply = _ALIVE
                if reply is None:
                    return
                await stream.send(reply)
                if reply.WhichOneof("kind") in ("commit", "dismissal"):
                    await stream.finish()
                    return

    async def _read(self, leader: Leader, peer_id: str, stream: MemberStream) -> None:
        with suppress(PeerUnavailable, TimeoutError):
            while True:
                async with asyncio.timeout(self._config.silence_s):
                    request = await stream.receive()
                if request is None:
                    return
                if request.WhichOneof("kind") == "report":
                    self._deliver(leader, leader.report(peer_id, request.report, self._context(), _now()))

    async def _tick(self, leader: Leader) -> None:
        """Tick the leader at intervals. Each member has such a task, so that ticking ends with the last member."""
        while True:
            if _now() >= self._ticked_s.get(leader, 0.0) + self._config.poll_s:  # one task ticks for all
                self._ticked_s[leader] = _now()
                self._deliver(leader, leader.tick(self._context(), _now()))
            await asyncio.sleep(self._config.poll_s)

    def _deliver(self, leader: Leader, replies: Replies) -> None:
        for peer_id, reply in replies:
            if (outbox := self._outboxes.get((leader, peer_id))) is not None:
                outbox.put_nowait(reply)


def _now() -> float:
    return asyncio.get_running_loop().time()
