"""One peer of a run: knows how far the others are, meets them, and answers what they ask."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from swarm_protocol.errors import PeerUnavailable, RequestRejected, SwarmError
from swarm_protocol.net.identity import Identity
from swarm_training.averaging.group import Group
from swarm_training.averaging.round import Round
from swarm_training.averaging.rounds import Rounds
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.compressor import Compressor, Encoder
from swarm_training.core.config import TrainingConfig
from swarm_training.core.local_talk import talk_pair
from swarm_training.core.network import Network, Talk
from swarm_training.core.record import LEFT, MEETING, TRAINING, Progress
from swarm_training.core.signing import read_signed, sign
from swarm_training.meeting.attending import Attendance, Averaged, Ballots, Dismissed
from swarm_training.meeting.leader import Outlook
from swarm_training.meeting.leading import Leading
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress import policy
from swarm_training.progress.board import Board
from swarm_training.progress.gossip import Gossip
from swarm_training.progress.policy import View
from swarm_training.progress.table import ProgressTable
from swarm_training.run.state import TrainedState
from swarm_training.run.transfer import Downloaded, StateServer, download

T = TypeVar("T")
InThread = Callable[[Callable[[], T]], Awaitable[T]]
_RETRY_S = 0.1
_FAILURES = 2.0  # times the silence that is suffered, before a leader who has failed is asked again
_SMOOTHING = 0.3  # of the newest measurement
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compression:
    compressor: Compressor
    encoder: Encoder | None = None


class TrainingPeer:
    """All on one event loop.

    Attributes:
        own: this peer's record.
        roster: ids of those who decide about the next step.
    """

    def __init__(
        self,
        config: TrainingConfig,
        identity: Identity,
        own: Progress,
        network: Network,
        board: Board,
        state: TrainedState,
        compression: Compression,
        in_thread: InThread[Any],
        rng: random.Random,
    ) -> None:
        self.own = dataclasses.replace(own, version=time.time_ns() // 1_000_000)
        self.roster: tuple[str, ...] = (own.peer_id,)
        self.table = ProgressTable(own.run, own.model, own.peer_id, config.silence_s, config.presume_gone_s)
        self._config = config
        self._identity = identity
        self._network = network
        self._board = board
        self._state = state
        self._compression = compression
        self._codec = codec_of(config.codec)
        self._rng = rng
        self._rounds = Rounds()
        self._ballots = Ballots()
        self._state_server = StateServer(state, in_thread)
        self.gossip = Gossip(config, self.table, network, board, self._renew, rng)
        self._leading = Leading(
            own.run, own.peer_id, self._outlook, self._note, self._referral, config.heartbeat_s, config.silence_s
        )
        self._unreachable_s: dict[str, float] = {}
        self._usual_s = 0.0  # that a round takes
        self._reported_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ life

    def listens_at(self, address: str, tls_fingerprint: bytes) -> None:
        self._update(address=address, tls_fingerprint=tls_fingerprint)

    def start(self) -> None:
        self._tasks.append(asyncio.ensure_future(self.gossip.run()))

    async def found(self, state_digest: bytes) -> None:
        """Begins the run, as its only peer so far."""
        await self._arrive(0, (self.own.peer_id,), b"", state_digest)

    async def find_others(self) -> None:
        """Raises:
        PeerUnavailable: nobody trains this run.
        ValueError: who does has another model, or another target.
        """
        deadline_s = _now() + self._config.join_timeout_s
        while not self.table.known():
            for record in await self._board.read():
                with suppress(ValueError):
                    self.table.add(record, _now())
                    continue
                await self._compare(record)
            if _now() > deadline_s:
                raise PeerUnavailable(f"nobody trains run {self.own.run!r} among the initial peers")
            await asyncio.sleep(_RETRY_S)
        for peer in self.table.known():
            if peer.target_batch_size != self.own.target_batch_size:
                theirs, own = peer.target_batch_size, self.own.target_batch_size
                raise ValueError(f"target_batch_size is {own} here and {theirs} in the run: expected the same")

    async def _compare(self, record: pb.SignedProgress) -> None:
        """Raises ValueError that says what differs, if the record is that of somebody who trains another model."""
        try:
            peer = read_signed(record)
        except ValueError:
            return
        if peer.run == self.own.run and peer.is_reachable:
            with suppress(SwarmError, TimeoutError):
                await download(self._network, peer, self._state)

    async def leave(self) -> None:
        """Says goodbye: others do not wait for this peer, and its samples are withdrawn."""
        self._update(state=LEFT, samples=0)
        record = self._renew()
        for task in self._tasks:
            task.cancel()
        calls = [self._network.exchange(peer, pb.ExchangeRequest(own=record)) for peer in self.view().others]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.silence_s):
                await asyncio.gather(self._board.publish(record), *calls, return_exceptions=True)

    # ------------------------------------------------------------ what the run asks

    def view(self) -> View:
        return self.table.view(self.own, _now())

    async def report(self, samples: int) -> None:
        """So many samples have been accumulated since the last global step."""
        now = _now()
        if self._reported_s is not None and samples > self.own.samples:
            call_s = max(now - self._reported_s, 1e-3)
            speed = (samples - self.own.samples) / call_s
            self._update(
                call_s=_smoothed(self.own.call_s, call_s), samples_per_s=_smoothed(self.own.samples_per_s, speed)
            )
        self._reported_s = now
        self._update(samples=samples)
        self.gossip.tell(urgent=policy.is_batch_complete(self.view()))

    async def is_due(self) -> bool:
        """Whether there is something to do before the next batch: averaging, or loading the state."""
        view = self.view()
        return policy.is_batch_complete(view) or self._is_lost(view)

    async def is_lost(self) -> bool:
        """Whether the others have gone on without this peer, or have another state."""
        return self._is_lost(self.view())

    async def average(self, gradient: Tensor) -> Averaged | None:
        """The mean over all who meet, weighted by samples; None if this peer has fallen behind, or if the batch is not
        complete after all.

        ``gradient``: [n] float32, the mean over this peer's own samples.
        """
        self._update(state=MEETING)
        self.gossip.tell(urgent=True)
        while True:
            view = self.view()
            if (known := self._confirmed(view)) is not None:
                return known
            if self._is_lost(view) or self._has_shrunk(view):
                self._update(state=TRAINING)
                return None
            leader = policy.leader_of(view, self._unreachable)
            if leader is not None:
                try:
                    return await self._attend(leader, gradient)
                except Dismissed as dismissed:
                    _logger.debug("%s: %s", leader.peer_id, dismissed)
                    if dismissed.referral is not None:
                        self.gossip.note(dismissed.referral)
                except (SwarmError, ValueError, TimeoutError) as error:
                    _logger.debug("%s does not lead: %s", leader.peer_id, error)
                    self.table.suspect(leader.peer_id)
                    self._unreachable_s[leader.peer_id] = _now()
            await asyncio.sleep(_RETRY_S * self._rng.uniform(0.5, 1.0))

    async def stepped(self, averaged: Averaged, state_digest: bytes) -> None:
        """The average has been applied."""
        if self._compression.encoder is not None:
            self._compression.encoder.commit()
        self._usual_s = _smoothed(self._usual_s, averaged.seconds)
        await self._arrive(self.own.step + 1, averaged.group.roster, averaged.digest, state_digest)

    async def download(self) -> Downloaded | None:
        """The state that most others have; None if this peer has caught up by itself, or is alone.

        Raises:
            ValueError: they train another model than this peer, which has not joined yet.
        """
        view = self.view()
        sources = list(policy.sources_of_state(view))
        self._rng.shuffle(sources)
        for source in sources:
            try:
                return await download(self._network, source, self._state)
            except (SwarmError, TimeoutError, ValueError) as error:
                if not isinstance(error, SwarmError | TimeoutError) and not self.own.state_digest:
                    raise
                _logger.debug("%s does not give its state: %s", source.peer_id, error)
                self.table.suspect(source.peer_id)
        await asyncio.sleep(_RETRY_S)
        return None

    async def refuse(self, downloaded: Downloaded, error: ValueError) -> None:
        """What was downloaded is no state."""
        _logger.warning("%s has not given its state: %s", downloaded.source, error)
        self.table.suspect(downloaded.source)

    async def loaded(self, downloaded: Downloaded, state_digest: bytes) -> None:
        """The state has been taken over; it counts if it is the one that most peers have had at that step."""
        with suppress(TimeoutError):  # news of that step may be on their way
            async with asyncio.timeout(self._config.silence_s):
                while self.table.majority_digest(downloaded.step) is None:
                    await asyncio.sleep(_RETRY_S)
        if self.table.majority_digest(downloaded.step) != state_digest:
            _logger.warning("%s has given another state than that of most peers", downloaded.source)
            self.table.suspect(downloaded.source)
            return
        await self._arrive(downloaded.step, downloaded.roster, downloaded.result_digest, state_digest)

    # ------------------------------------------------------------ what others ask

    async def exchange(self, peer_id: str, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        record = self._note(request.own)
        if record.peer_id != peer_id:
            raise RequestRejected("the record of progress is that of another peer")
        return pb.ExchangeReply(records=self.table.since(request.since, peer_id), until=self.table.counter)

    async def meet(self, peer_id: str, talk: Talk[pb.MeetReply, pb.MeetRequest]) -> None:
        await self._leading.serve(peer_id, talk)

    async def reduce(self, peer_id: str, talk: Talk[pb.Chunk, pb.ReduceRequest]) -> None:
        first = await talk.receive()
        if first is None or first.WhichOneof("kind") != "open":
            raise RequestRejected("a stream of parts must begin with `open`")
        found = await self._rounds.find(first.open.group, first.open.phase, self._config.straggler_s)
        await found.serve_reduce(_number_of(peer_id, found.group), first.open.attempt, talk)

    async def fetch(self, peer_id: str, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]:
        found = await self._rounds.find(request.group, request.phase, self._config.straggler_s)
        _number_of(peer_id, found.group)
        for chunk in found.serve_fetch(request.chunks):
            yield chunk

    async def state(self, peer_id: str) -> AsyncIterator[pb.StatePart]:
        async for part in self._state_server.parts(lambda: self.own.step):
            yield part

    # ------------------------------------------------------------ meeting

    @property
    def _unreachable(self) -> frozenset[str]:
        """Who has not led when asked to, not long ago."""
        since_s = _now() - _FAILURES * self._config.silence_s
        return frozenset(peer_id for peer_id, failed_s in self._unreachable_s.items() if failed_s > since_s)

    async def _attend(self, leader: Progress, gradient: Tensor) -> Averaged:
        join = pb.Join(
            own=self._renew(),
            step=self.own.step,
            samples=self.own.samples,
            promised=self._ballots.promised,
            accepted=self._ballots.accepted,
            unreachable=sorted(self._unreachable),
        )

        def still_leads() -> bool:
            view = self.view()
            best = policy.leader_of(view, self._unreachable)
            is_moot = self._is_lost(view) or self._confirmed(view) is not None
            return not is_moot and best is not None and best.peer_id == leader.peer_id

        def attendance(talk: Talk[pb.MeetRequest, pb.MeetReply]) -> Attendance:
            config = self._config
            return Attendance(
                self.own.peer_id,
                talk,
                self._ballots,
                self._rounds,
                self._make_round,
                still_leads,
                config.heartbeat_s,
                config.silence_s,
            )

        if self._compression.encoder is not None:
            self._compression.encoder.rollback()  # of a meeting that came to nothing
        phases = self._compression.compressor.phases(gradient)
        if leader.peer_id != self.own.peer_id:
            async with self._network.meet(leader) as talk:
                return await attendance(talk).attend(join, phases)
        own_talk, served_talk = talk_pair(pb.MeetRequest, pb.MeetReply)
        serving = asyncio.ensure_future(self._leading.serve(self.own.peer_id, served_talk))
        try:
            return await attendance(own_talk).attend(join, phases)
        finally:
            own_talk.break_off()
            await asyncio.gather(serving, return_exceptions=True)

    def _make_round(self, group: Group, me: int, phase: int, vector: Tensor) -> Round:
        elements = self._config.chunk_elements
        return Round(self._network, group, me, phase, vector, self._codec, elements, self._compression.encoder)

    def _outlook(self) -> Outlook:
        view = self.view()
        expected = policy.expected_at(view, self.own.step, self.roster)
        slowest_s = max((peer.call_s for peer in view.all if peer.peer_id in expected), default=0.0)
        straggler_s = self._config.straggler_s
        return Outlook(
            expected,
            policy.known_at(view, self.own.step),
            self.roster,
            view.gone,
            wait_s=min(straggler_s + 2 * slowest_s, self._config.max_meeting_s),
            deadline_s=max(straggler_s, 2 * self._usual_s),
        )

    def _referral(self, join: pb.Join) -> pb.Dismissal | None:
        if join.step != self.own.step or self.own.state == LEFT:
            return pb.Dismissal(reason=f"this peer is at step {self.own.step}")
        best = policy.leader_of(self.view(), join.unreachable)
        if best is None or best.peer_id == self.own.peer_id:
            return None
        return pb.Dismissal(reason="another peer leads", leader=self.table.signed_of(best.peer_id))

    def _confirmed(self, view: View) -> Averaged | None:
        """The result that this peer holds, if another says that it was the one which led to the next step."""
        ballots = self._ballots
        if ballots.gradient is None or ballots.group is None:
            return None
        digest = ballots.accepted.digest
        if any(peer.step == self.own.step + 1 and peer.result_digest == digest for peer in view.others):
            return Averaged(ballots.gradient, digest, ballots.group, self._usual_s)
        return None

    def _is_lost(self, view: View) -> bool:
        return policy.is_behind(view, self.roster) or policy.is_in_minority(view)

    def _has_shrunk(self, view: View) -> bool:
        """Somebody has left before the meeting, and nobody waits at it."""
        enough = policy.samples_at(view, self.own.step) >= self.own.target_batch_size
        return not enough and not any(peer.state == MEETING and peer.step == self.own.step for peer in view.others)

    # ------------------------------------------------------------ records

    async def _arrive(self, step: int, roster: tuple[str, ...], result_digest: bytes, state_digest: bytes) -> None:
        self._ballots = Ballots()
        self.roster = roster
        self._state_server.remember(step, roster, result_digest)
        self._reported_s = _now()
        self._update(step=step, samples=0, state=TRAINING, result_digest=result_digest, state_digest=state_digest)
        self.gossip.tell(urgent=True)

    def _update(self, **changes: Any) -> None:
        self.own = dataclasses.replace(self.own, **changes)

    def _renew(self) -> pb.SignedProgress:
        self._update(version=self.own.version + 1)
        signed = sign(self.own, self._identity)
        self.table.add(signed, _now())
        return signed

    def _note(self, signed: pb.SignedProgress) -> Progress:
        self.table.add(signed, _now())
        return read_signed(signed)


def _number_of(peer_id: str, group: Group) -> int:
    if peer_id not in group.peer_ids:
        raise RequestRejected("the caller is no member of the group")
    return group.peer_ids.index(peer_id)


def _smoothed(old: float, new: float) -> float:
    return new if old == 0 else old + _SMOOTHING * (new - old)


def _now() -> float:
    return asyncio.get_running_loop().time()
