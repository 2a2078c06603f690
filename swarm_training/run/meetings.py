"""A peer's part in averaging: it attends meetings, leads some of them, and owns chunks in the rounds that follow."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from torch import Tensor

from swarm_protocol.dht.records import short_id
from swarm_protocol.errors import RequestRejected, SwarmError
from swarm_protocol.net.shares import Caller
from swarm_protocol.streams.limits import Places
from swarm_training.averaging.group import Group
from swarm_training.averaging.round import AveragingRound, VectorCoding
from swarm_training.averaging.rounds import Rounds
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.compressor import Compressor
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.core.callbacks import InThread
from swarm_training.core.config import TrainingConfig
from swarm_training.core.local_stream import stream_pair
from swarm_training.core.moment import Moment
from swarm_training.core.network import MessageStream, Network
from swarm_training.core.record import LEFT, MEETING, TRAINING, Progress
from swarm_training.evaluation.evaluator import Evaluator
from swarm_training.ledger.book import Book
from swarm_training.meeting.attending import Averaged, Ballots, Dismissed, MeetingClient, WentBack
from swarm_training.meeting.leader import LeaderContext
from swarm_training.meeting.leading import Leading
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress import policy
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.progress.gossip import Gossip
from swarm_training.progress.policy import LocalView
from swarm_training.rollback.rollbacks import Rollbacks
from swarm_training.run.standing import PeerState, now, smoothed

NO_LOSS = 0.0, 0
_FAILURES = 2.0  # the time before a leader that has failed is asked again, in multiples of ``silence_s``
# Calls that wait for a round of averaging, in total and of one caller. A member needs few of them.
_MOST_WAITING, _MOST_WAITING_OF_ONE = 1 << 14, 16
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Environment:
    """The things that a peer uses and does not own, which tests simulate: other peers, the DHT, threads and chance.
    ``in_thread``: calls a function that takes long in another thread."""

    network: Network
    board: DhtPeerRegistry
    in_thread: InThread
    rng: random.Random


@dataclass(frozen=True)
class Decisions:
    """The objects behind the decisions that a meeting takes beside an average: rollbacks and evaluations."""

    rollbacks: Rollbacks
    evaluator: Evaluator


@dataclass(frozen=True)
class GradientCompression:
    """The compression of the averaged vectors. ``encoder``: None if the codec's losses are not remembered."""

    compressor: Compressor
    encoder: ErrorFeedback | None = None


class Averager:
    """The averager of one peer, which attends meetings or leads them."""

    def __init__(
        self,
        config: TrainingConfig,
        standing: PeerState,
        environment: Environment,
        gossip: Gossip,
        compression: GradientCompression,
        decisions: Decisions,
        book: Book,
    ) -> None:
        own = standing.own
        self._config = config
        self._standing = standing
        self._network = environment.network
        self._gossip = gossip
        self._compression = compression
        self._rollbacks = decisions.rollbacks
        self._evaluator = decisions.evaluator
        self._book = book
        self._coding = VectorCoding(codec_of(config.codec), config.chunk_elements, compression.encoder)
        self._rng = environment.rng
        self._clipping = environment.in_thread if config.aggregation == "centered_clip" else None
        self._rounds = Rounds()
        self._waiting = Places("calls that wait for a round", _MOST_WAITING, _MOST_WAITING_OF_ONE)
        self._ballots = Ballots()
        self._leading = Leading(
            own.run,
            own.peer_id,
            self._context,
            standing.note,
            self._referral,
            config,
            book.crediting,
        )
        self._unreachable_s: dict[str, float] = {}  # by leader, when it failed last
        self._usual_s = 0.0  # the duration of a round
        self._loss = NO_LOSS

    def set_loss(self, loss: float, samples: int) -> None:
        """Set the mean loss of this peer's share of the batch, and the number of samples behind it."""
        self._loss = loss, samples

    def is_due(self, view: LocalView) -> bool:
        """Return whether to meet now. Without any samples, peers meet only to go back to a checkpoint. They do not meet
        once the run has ended."""
        if view.own.has_ended or self._standing.others_have_ended:
            return False
        has_some = policy.samples_at(view, view.own.moment) > 0
        return (has_some and policy.is_batch_complete(view)) or self._rollbacks.cannot_wait(view)

    async def average(self, gradient: Tensor) -> Averaged | WentBack | None:
        """Return the mean over all peers that meet, weighted by samples, or the checkpoint that all go back to instead.
        Return None if this peer has fallen behind, or if the batch is not complete after all.

        ``gradient``: [n] float32, the mean over this peer's own samples. If micro-batches are counted exactly, it is
        the sum over the reported ones, which must not change meanwhile; it is float64 if the codec is fp64.
        """
        self._standing.update(state=MEETING, loss=self._loss[0], loss_samples=self._loss[1])
        self._gossip.tell(urgent=True)
        warning = asyncio.get_running_loop().call_later(2 * self._config.max_meeting_s, self._say_who_is_missed)
        try:
            return await self._met(gradient)
        finally:
            warning.cancel()

    async def _met(self, gradient: Tensor) -> Averaged | WentBack | None:
        while True:
            self._standing.require_admitted(self._standing.own.peer_id)
            self._show_accepted()
            view = self._standing.view()
            if (known := self._confirmed(view)) is not None:
                return known
            if self._standing.is_lost or self._standing.others_have_ended or self._has_shrunk(view):
                self._standing.update(state=TRAINING)
                return None
            leader = policy.leader_of(view, self._unreachable)
            if leader is not None:
                try:
                    result = await self._attend(leader, gradient)
                    if isinstance(result, Averaged):
                        weights = {member.record.peer_id: member.weight for member in result.group.members}
                        moment, given = result.group.moment, self._ballots.given
                        self._book.committed(result.round, moment, leader.peer_id, weights, given)
                    return result
                except Dismissed as dismissed:
                    _logger.debug("%s: %s", leader.peer_id, dismissed)
                    if dismissed.referral is not None:
                        self._gossip.note([dismissed.referral])
                except (SwarmError, ValueError, TimeoutError) as error:
                    _logger.debug("%s does not lead: %s", leader.peer_id, error)
                    self._standing.table.suspect(leader.peer_id)
                    self._unreachable_s[leader.peer_id] = now()
            await asyncio.sleep(self._config.poll_s * self._rng.uniform(0.5, 1.0))

    def _show_accepted(self) -> None:
        """Publish the accepted result if counting is exact: others must meet again, as it may have been decided."""
        digest = self._ballots.accepted.digest
        if self._standing.own.counts_exactly and self._standing.own.accepted != digest:
            self._standing.update(accepted=digest)
            self._gossip.tell(urgent=True)

    def stepped(self, averaged: Averaged) -> tuple[int, int]:
        """Record that the average was applied. Return the bytes that this peer has sent and received for it."""
        phases = self._rounds.of(averaged.group.id)
        if self._compression.encoder is not None:
            self._compression.encoder.commit({place for each in phases for place in each.settled})
        self._usual_s = smoothed(self._usual_s, averaged.seconds)
        return sum(each.bytes_sent for each in phases), sum(each.bytes_received for each in phases)

    def took_over_state(self) -> None:
        """Discard the errors of encoding, which belong to the replaced state."""
        if self._compression.encoder is not None:
            self._compression.encoder.forget()

    def decided(self) -> None:
        """Free this member's vectors, because a result is decided; results stay for late members."""
        self._rounds.forget_vectors()

    def forget(self) -> None:
        """Discard the promises and the loss of the last step, which do not matter at the next one."""
        self._ballots = Ballots()
        self._rounds.end_step()
        self._loss = NO_LOSS

    # ------------------------------------------------------------ requests of other peers

    async def meet(self, peer_id: str, stream: MessageStream[pb.MeetReply, pb.MeetRequest]) -> None:
        self._standing.require_admitted(peer_id)
        await self._leading.serve(peer_id, stream)

    async def reduce(self, peer_id: str, stream: MessageStream[pb.Chunk, pb.ReduceRequest]) -> None:
        with self._waiting.taken(Caller(peer_id)):  # a stranger may open streams and send nothing
            async with asyncio.timeout(self._config.silence_s):
                first = await stream.receive()
            if first is None or first.WhichOneof("kind") != "open":
                raise RequestRejected("a stream of parts must begin with `open`")
            found = await self._rounds.find(first.open.group, first.open.phase, self._config.straggler_s)
        await found.serve_reduce(_number_of(peer_id, found.group), first.open.attempt, stream)

    async def fetch(self, peer_id: str, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]:
        with self._waiting.taken(Caller(peer_id)):
            found = await self._rounds.find(request.group, request.phase, self._config.straggler_s)
        _number_of(peer_id, found.group)
        for chunk in found.serve_fetch(request.chunks):
            yield chunk

    # ------------------------------------------------------------ one meeting

    @property
    def _unreachable(self) -> frozenset[str]:
        """Return the ids of the peers that recently failed to lead."""
        since_s = now() - _FAILURES * self._config.silence_s
        return frozenset(peer_id for peer_id, failed_s in self._unreachable_s.items() if failed_s > since_s)

    async def _attend(self, leader: Progress, gradient: Tensor) -> Averaged | WentBack:
        join = pb.Join(
            own=self._standing.renew(),
            step=self._standing.own.step,
            rollbacks=self._standing.own.rollbacks,
            samples=self._standing.own.samples,
            promised=self._ballots.promised,
            accepted=self._ballots.accepted,
            unreachable=sorted(self._unreachable),
            checkpoints=self._rollbacks.claims(),
            contribution=self._book.crediting.own(self._given),
        )

        def still_leads() -> bool:
            view = self._standing.view()
            best = policy.leader_of(view, self._unreachable)
            is_moot = self._standing.is_lost or self._standing.others_have_ended or self._confirmed(view) is not None
            is_moot = is_moot or (self._standing.own.counts_exactly and self._has_shrunk(view))
            return not is_moot and best is not None and best.peer_id == leader.peer_id

        def client(stream: MessageStream[pb.MeetRequest, pb.MeetReply]) -> MeetingClient:
            return MeetingClient(
                self._standing.own.peer_id,
                stream,
                self._ballots,
                self._rounds,
                self._make_round,
                self._checkpoint,
                still_leads,
                self._config,
            )

        # An accepted average may still be decided: then the errors of its meeting count.
        if self._compression.encoder is not None and self._ballots.gradient is None:
            self._compression.encoder.rollback()  # discards the errors of a failed meeting
        phases = self._compression.compressor.phases(gradient)
        if leader.peer_id != self._standing.own.peer_id:
            async with self._network.meet(leader) as stream:
                return await client(stream).attend(join, phases)
        # A leader is a member of its own meeting, through a stream inside this process.
        own_stream, served_stream = stream_pair(pb.MeetRequest, pb.MeetReply)
        serving = asyncio.ensure_future(self._leading.serve(self._standing.own.peer_id, served_stream))
        try:
            return await client(own_stream).attend(join, phases)
        finally:
            own_stream.break_off()
            await asyncio.gather(serving, return_exceptions=True)

    @property
    def _given(self) -> int:
        """Return the number of this peer's samples in the result that it holds, or else in the next one."""
        return self._ballots.given if self._ballots.accepted.group else self._standing.own.samples

    def _make_round(self, group: Group, me: int, phase: int, vector: Tensor) -> AveragingRound:
        return AveragingRound(self._network, group, me, phase, vector, self._coding, self._clipping)

    async def _checkpoint(self, group: Group) -> StateFile | None:
        standing = self._standing
        return await self._rollbacks.checkpoint(group, standing.own, standing.roster, standing.view())

    def _context(self) -> LeaderContext:
        view = self._standing.view()
        expected = policy.expected_at(view, view.own.moment, self._standing.roster)
        slowest_s = max((peer.call_s for peer in view.all if peer.peer_id in expected), default=0.0)
        straggler_s = self._config.straggler_s
        # A peer comes to the meeting only between two of its calls, so the wait depends on the slowest call.
        return LeaderContext(
            expected,
            policy.known_at(view, view.own.moment),
            self._standing.roster,
            view.gone,
            wait_s=min(straggler_s + 2 * slowest_s, self._config.max_meeting_s),
            deadline_s=max(straggler_s, 2 * self._usual_s),
            judge=self._rollbacks.judge(view.own.moment),
            evaluations=self._evaluator.to_agree_on(view.own.moment),
            is_over=self._standing.others_have_ended,
        )

    def _referral(self, join: pb.Join) -> pb.Dismissal | None:
        own = self._standing.own
        if Moment(join.rollbacks, join.step) != own.moment or own.state == LEFT:
            return pb.Dismissal(reason=f"this peer is at step {own.step}, after {own.rollbacks} rollbacks")
        if own.decided:
            return pb.Dismissal(reason="the average of this step is decided")
        best = policy.leader_of(self._standing.view(), join.unreachable)
        if best is None or best.peer_id == own.peer_id:
            return None
        return pb.Dismissal(reason="another peer leads", leader=self._standing.table.signed_of(best.peer_id))

    def _confirmed(self, view: LocalView) -> Averaged | WentBack | None:
        """Return this peer's result if another peer's record says that it led, or will lead, to the next moment."""
        result = self._ballots.result
        if result is None:
            return None
        then = result.group.next_moment
        later = *view.others, *self._standing.table.ended()
        has_led = any(peer.moment == then and peer.result_digest == result.digest for peer in later)
        if not has_led and not any(peer.decided == result.digest for peer in view.at(result.group.moment)):
            return None
        # The result has no duration of its own, because this peer's meeting ended without a commit.
        return replace(result, seconds=self._usual_s) if isinstance(result, Averaged) else result

    def _say_who_is_missed(self) -> None:
        view = self._standing.view()
        present = {peer.peer_id for peer in view.all}
        missed = sorted(set(self._standing.roster) - view.gone - present)
        _logger.warning(
            "step %d waits for a quorum of the peers that took the last step: %d of these %d peers are silent (%s) and "
            "may have ended; `presume_gone_s` sets how long silent peers count",
            self._standing.own.step + 1,
            len(missed),
            len(self._standing.roster),
            ", ".join(map(short_id, missed)) or "none",
        )

    def _has_shrunk(self, view: LocalView) -> bool:
        """Return whether peers have left so that too few samples remain; any will do if another peer waits to meet."""
        if self._rollbacks.cannot_wait(view):
            return False
        if view.own.counts_exactly:
            return not policy.is_batch_complete(view)
        samples = policy.samples_at(view, view.own.moment)
        waits = any(peer.state == MEETING for peer in view.at(view.own.moment) if peer is not view.own)
        return not samples or (samples < view.own.target_batch_size and not waits)


def _number_of(peer_id: str, group: Group) -> int:
    if peer_id not in group.peer_ids:
        raise RequestRejected("the caller is no member of the group")
    return group.peer_ids.index(peer_id)
