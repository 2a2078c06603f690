"""A member's part in a meeting under a leader, and in the averaging that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from swarm_protocol.codecs.bitmap import to_bits
from swarm_protocol.errors import PeerUnavailable, RequestRejected
from swarm_protocol.process.routine import end_tasks
from swarm_training.averaging.group import Group
from swarm_training.averaging.round import AveragingRound
from swarm_training.averaging.rounds import Rounds
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.compression.compressor import Phases
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.network import MeetStream
from swarm_training.pb import training_pb2 as pb
from swarm_training.rollback.judging import digest_of

_ALIVE = pb.MeetRequest(alive=pb.Alive())
MakeRound = Callable[[Group, int, int, Tensor], AveragingRound]


class Dismissed(Exception):
    """The failure of a meeting for this peer. ``referral`` is the record of the peer to ask instead, if known."""

    def __init__(self, reason: str, referral: pb.SignedProgress | None = None) -> None:
        super().__init__(reason)
        self.referral = referral


@dataclass
class Ballots:
    """The promises of one peer and its accepted result at one step; see ``swarm_training.meeting.leader``."""

    promised: int = 0  # the ballot of this peer's last group: it refuses groups with this ballot or a lower one
    accepted: pb.Accepted = field(default_factory=pb.Accepted)
    group: Group | None = None  # the group of ``accepted``
    gradient: Tensor | None = None  # the average that belongs to ``accepted``
    state: StateFile | None = None  # the state of an accepted checkpoint; None: this peer's own
    given: int = 0  # the number of this peer's samples in the accepted result

    def promise(self, ballot: int) -> None:
        self.promised = ballot

    def accept(
        self, group: Group, digest: bytes, samples: int, gradient: Tensor | None = None, state: StateFile | None = None
    ) -> None:
        """Record that this peer holds the result on which the group is to decide, and promises to keep it.

        ``samples``: the samples with which this peer joined the group. They are in the result if the group made the
        result. If the group takes over an earlier result, only this peer's samples in that one count.
        """
        if group.go_back is not None:
            self.given = 0
        elif not group.continues:
            self.given = samples
        elif digest != self.accepted.digest:
            self.given = 0
        self.accepted = pb.Accepted(
            ballot=group.ballot,
            group=group.id,
            digest=digest,
            layout=group.layout,
            roster=group.roster,
            go_back=group.go_back,
            evaluations=group.evaluations,
        )
        self.group, self.gradient, self.state = group, gradient, state

    @property
    def result(self) -> Averaged | WentBack | None:
        """Return the accepted result; None if there is none."""
        if self.group is None:
            return None
        if self.gradient is None:
            return WentBack(self.state, self.accepted.digest, self.group)
        return Averaged(self.gradient, self.accepted.digest, self.group)


@dataclass(frozen=True)
class Averaged:
    """A decided average. ``gradient``: [n] in the codec's type, bit-identical at all peers. ``digest``: that of the
    encoded results of all phases. ``round``: the round that the leader has signed for the ledger."""

    gradient: Tensor
    digest: bytes
    group: Group
    seconds: float = 0.0  # from the forming of the group to its decision
    round: bytes = b""


@dataclass(frozen=True)
class WentBack:
    """A decided rollback to the group's checkpoint. ``state``: its state; None if this peer has it already."""

    state: StateFile | None
    digest: bytes
    group: Group


@dataclass(eq=False, repr=False)
class MeetingClient:
    """The client of one meeting, with which one peer takes part in it."""

    _peer_id: str
    _stream: MeetStream
    _ballots: Ballots
    _rounds: Rounds
    _make_round: MakeRound  # takes a group, this peer's number in it, the phase and the vector
    # Returns the state that a group goes back to, or None for this peer's own; raises if this peer disagrees.
    _checkpoint: Callable[[Group], Awaitable[StateFile | None]]
    _is_leader: Callable[[], bool]  # whether the leader should still lead: until a group forms, a better one may come
    _config: TrainingConfig
    _replies: asyncio.Queue[pb.MeetReply] = field(default_factory=asyncio.Queue)
    _round: AveragingRound | None = None
    _dropped: set[int] = field(default_factory=set)
    _has_group: bool = False

    async def attend(self, join: pb.Join, phases: Phases) -> Averaged | WentBack:
        """Attend the meeting, and return its decision. ``phases`` yields the vectors to average; it is closed at last.

        Raises:
            PeerUnavailable: the leader is gone, or silent.
            Dismissed: the leader says that this peer cannot take part, or that the meeting has failed. Or another peer
                should lead by now.
            ValueError: the leader has sent an invalid message.
        """
        try:
            await self._stream.send(pb.MeetRequest(join=join))
            listening = asyncio.create_task(self._listen())
            talking = asyncio.create_task(self._keep_alive())
            watching = asyncio.create_task(self._watch_leader())
            acting = asyncio.create_task(self._act(join, phases))
            try:
                await asyncio.wait([listening, watching, acting], return_when=asyncio.FIRST_COMPLETED)
                if acting.done():
                    return acting.result()
                if listening.done():
                    listening.result()
                raise Dismissed("another peer leads")
            finally:
                await end_tasks([listening, talking, watching, acting])
        finally:
            phases.close()

    async def _listen(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.silence_s):
                    reply = await self._stream.receive()
            except TimeoutError:
                raise PeerUnavailable("the leader is silent") from None
            if reply is None:
                raise PeerUnavailable("the leader has ended the meeting")
            kind = reply.WhichOneof("kind")
            if kind == "dropped":
                self._dropped.add(reply.dropped.member)
                if self._round is not None:
                    self._round.drop(reply.dropped.member)
            elif kind != "alive":
                self._replies.put_nowait(reply)
                if kind in ("commit", "dismissal"):
                    await asyncio.Event().wait()  # until ``_act`` has ended

    async def _keep_alive(self) -> None:
        with suppress(PeerUnavailable):
            while True:
                await asyncio.sleep(self._config.heartbeat_s)
                await self._stream.send(_ALIVE)

    async def _watch_leader(self) -> None:
        """Return once another peer should lead, unless a group has been formed."""
        while self._has_group or self._is_leader():
            await asyncio.sleep(2 * self._config.poll_s)

    async def _act(self, join: pb.Join, phases: Phases) -> Averaged | WentBack:
        group = self._parse((await self._next("group")).group, Moment(join.rollbacks, join.step))
        self._has_group = True
        began_s = asyncio.get_running_loop().time()
        me = group.peer_ids.index(self._peer_id)
        self._ballots.promise(group.ballot)
        if group.go_back is not None:
            return await self._go_back(group, group.go_back)
        if group.continues and group.continues == self._ballots.accepted.group:
            phases = _replay(self._rounds.of(group.continues), self._ballots.gradient)
        vector = next(phases)
        phase = 0
        while True:
            await self._average(group, me, phase, vector)
            assert self._round is not None
            phase += 1
            try:
                vector = phases.send(await self._round.mean())
            except StopIteration as finished:
                gradient: Tensor = finished.value
                break
        digest = group.bound(await self._rounds.digest_of(group.id))
        self._ballots.accept(group, digest, join.samples, gradient)
        commit = await self._decided(phase, digest)
        return Averaged(gradient, digest, group, asyncio.get_running_loop().time() - began_s, commit.round)

    async def _go_back(self, group: Group, go_back: pb.Rollback) -> WentBack:
        digest = digest_of(group.members[0].record.run, group.moment, go_back)
        if self._ballots.accepted.digest == digest:
            state = self._ballots.state
        else:
            state = await self._checkpoint(group)
        self._ballots.accept(group, digest, 0, state=state)
        await self._decided(0, digest)
        return WentBack(state, digest, group)

    async def _decided(self, phase: int, digest: bytes) -> pb.Commit:
        """Report the result, and wait until the leader confirms that a quorum holds it."""
        await self._stream.send(pb.MeetRequest(report=pb.Report(phase=phase, digest=digest)))
        commit = (await self._next("commit")).commit
        if commit.digest != digest:
            raise Dismissed("most members have got another result")
        return commit

    async def _average(self, group: Group, me: int, phase: int, vector: Tensor) -> None:
        """Average the vector of one phase. Return when all members have the whole result."""
        self._round = current = self._make_round(group, me, phase, vector)
        for member in self._dropped:
            current.drop(member)
        if group.continues and group.continues == self._ballots.accepted.group:
            current.take_over(self._rounds.of(group.continues)[phase])
        await self._rounds.add(current, self._ballots.accepted.group)
        if not group.continues:  # otherwise members only fetch what they lack of the earlier result
            await current.first_attempt()
        attempt = 0
        while True:
            await self._stream.send(pb.MeetRequest(report=_report_of(current, attempt)))
            plan = (await self._next("plan")).plan
            if plan.phase == phase + 1:
                if not current.is_complete:
                    raise RequestRejected("the leader goes on while parts of the result are missing")
                return
            attempt = plan.attempt
            fetch = {each.chunk: each.member for each in plan.fetch}
            await current.repair(fetch, {each.chunk: each.member for each in plan.redo})

    async def _next(self, kind: str) -> pb.MeetReply:
        reply = await self._replies.get()
        got = reply.WhichOneof("kind")
        if got == "dismissal":
            leader = reply.dismissal.leader if reply.dismissal.HasField("leader") else None
            raise Dismissed(reply.dismissal.reason, leader)
        if got != kind:
            raise RequestRejected(f"the leader has sent a {got}: expected a {kind}")
        return reply

    def _parse(self, message: pb.Group, moment: Moment) -> Group:
        group = Group.parse(message)
        if group.moment != moment or group.ballot <= self._ballots.promised or self._peer_id not in group.peer_ids:
            raise RequestRejected("the leader's group is of another moment, has an old ballot or lacks this peer")
        return group.limited(self._config.max_samples) if self._config.max_samples else group


def _replay(rounds: Sequence[AveragingRound], gradient: Tensor | None) -> Phases:
    """Yield the vectors that were averaged already, because a compressor must not process a gradient twice."""
    assert gradient is not None
    for finished in rounds:
        yield finished.vector
    return gradient


def _report_of(current: AveragingRound, attempt: int) -> pb.Report:
    return pb.Report(
        phase=current.phase,
        attempt=attempt,
        num_chunks=len(current.chunks),
        held=to_bits(current.results, len(current.chunks)),
        broken=sorted(current.broken),
    )
