"""This peer's meetings: it attends them, leads those of others, and owns chunks in the rounds that follow."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from torch import Tensor

from swarm_protocol.dht.records import short_id
from swarm_protocol.errors import RequestRejected, SwarmError
from swarm_training.averaging.group import Group
from swarm_training.averaging.round import Round
from swarm_training.averaging.rounds import Rounds
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.compressor import Compressor, Encoder
from swarm_training.core.config import TrainingConfig
from swarm_training.core.local_talk import talk_pair
from swarm_training.core.network import Network, Talk
from swarm_training.core.record import LEFT, MEETING, TRAINING, Progress
from swarm_training.meeting.attending import Attendance, Averaged, Ballots, Dismissed
from swarm_training.meeting.leader import Outlook
from swarm_training.meeting.leading import Leading
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress import policy
from swarm_training.progress.gossip import Gossip
from swarm_training.progress.policy import View
from swarm_training.run.standing import Standing, now, smoothed

_RETRY_S = 0.1
_FAILURES = 2.0  # times the silence that is suffered, before a leader who has failed is asked again
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compression:
    compressor: Compressor
    encoder: Encoder | None = None


class Meetings:
    def __init__(
        self,
        config: TrainingConfig,
        standing: Standing,
        network: Network,
        gossip: Gossip,
        compression: Compression,
        rng: random.Random,
    ) -> None:
        own = standing.own
        self._config = config
        self._standing = standing
        self._network = network
        self._gossip = gossip
        self._compression = compression
        self._codec = codec_of(config.codec)
        self._rng = rng
        self._rounds = Rounds()
        self._ballots = Ballots()
        self._leading = Leading(
            own.run, own.peer_id, self._outlook, standing.note, self._referral, config.heartbeat_s, config.silence_s
        )
        self._unreachable_s: dict[str, float] = {}  # when a leader has failed
        self._usual_s = 0.0  # that a round takes

    async def average(self, gradient: Tensor) -> Averaged | None:
        """The mean over all who meet, weighted by samples; None if this peer has fallen behind, or if the batch is not
        complete after all.

        ``gradient``: [n] float32, the mean over this peer's own samples.
        """
        self._standing.update(state=MEETING)
        self._gossip.tell(urgent=True)
        warning = asyncio.get_running_loop().call_later(2 * self._config.max_meeting_s, self._say_who_is_missed)
        try:
            return await self._met(gradient)
        finally:
            warning.cancel()

    async def _met(self, gradient: Tensor) -> Averaged | None:
        while True:
            self._standing.moderation.require_admitted(self._standing.own.peer_id)
            view = self._standing.view()
            if (known := self._confirmed(view)) is not None:
                return known
            if self._standing.is_lost or self._has_shrunk(view):
                self._standing.update(state=TRAINING)
                return None
            leader = policy.leader_of(view, self._unreachable)
            if leader is not None:
                try:
                    return await self._attend(leader, gradient)
                except Dismissed as dismissed:
                    _logger.debug("%s: %s", leader.peer_id, dismissed)
                    if dismissed.referral is not None:
                        self._gossip.note(dismissed.referral)
                except (SwarmError, ValueError, TimeoutError) as error:
                    _logger.debug("%s does not lead: %s", leader.peer_id, error)
                    self._standing.table.suspect(leader.peer_id)
                    self._unreachable_s[leader.peer_id] = now()
            await asyncio.sleep(_RETRY_S * self._rng.uniform(0.5, 1.0))

    def stepped(self, averaged: Averaged) -> tuple[int, int]:
        """The average has been applied. Returns the bytes that this peer has sent and received for it."""
        if self._compression.encoder is not None:
            self._compression.encoder.commit()
        self._usual_s = smoothed(self._usual_s, averaged.seconds)
        phases = self._rounds.of(averaged.group.id)
        return sum(each.bytes_sent for each in phases), sum(each.bytes_received for each in phases)

    def forget(self) -> None:
        """What was promised at the last step does not matter at the next."""
        self._ballots = Ballots()

    # ------------------------------------------------------------ what others ask

    async def meet(self, peer_id: str, talk: Talk[pb.MeetReply, pb.MeetRequest]) -> None:
        self._standing.moderation.require_admitted(peer_id)
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

    # ------------------------------------------------------------ one meeting

    @property
    def _unreachable(self) -> frozenset[str]:
        """Who has not led when asked to, not long ago."""
        since_s = now() - _FAILURES * self._config.silence_s
        return frozenset(peer_id for peer_id, failed_s in self._unreachable_s.items() if failed_s > since_s)

    async def _attend(self, leader: Progress, gradient: Tensor) -> Averaged:
        join = pb.Join(
            own=self._standing.renew(),
            step=self._standing.own.step,
            samples=self._standing.own.samples,
            promised=self._ballots.promised,
            accepted=self._ballots.accepted,
            unreachable=sorted(self._unreachable),
        )

        def still_leads() -> bool:
            view = self._standing.view()
            best = policy.leader_of(view, self._unreachable)
            is_moot = self._standing.is_lost or self._confirmed(view) is not None
            return not is_moot and best is not None and best.peer_id == leader.peer_id

        def attendance(talk: Talk[pb.MeetRequest, pb.MeetReply]) -> Attendance:
            config = self._config
            return Attendance(
                self._standing.own.peer_id,
                talk,
                self._ballots,
                self._rounds,
                self._make_round,
                still_leads,
                config.heartbeat_s,
                config.silence_s,
            )

        if self._compression.encoder is not None and self._ballots.gradient is None:
            self._compression.encoder.rollback()  # of a meeting that came to nothing
        phases = self._compression.compressor.phases(gradient)
        if leader.peer_id != self._standing.own.peer_id:
            async with self._network.meet(leader) as talk:
                return await attendance(talk).attend(join, phases)
        own_talk, served_talk = talk_pair(pb.MeetRequest, pb.MeetReply)
        serving = asyncio.ensure_future(self._leading.serve(self._standing.own.peer_id, served_talk))
        try:
            return await attendance(own_talk).attend(join, phases)
        finally:
            own_talk.break_off()
            await asyncio.gather(serving, return_exceptions=True)

    def _make_round(self, group: Group, me: int, phase: int, vector: Tensor) -> Round:
        elements = self._config.chunk_elements
        return Round(self._network, group, me, phase, vector, self._codec, elements, self._compression.encoder)

    def _outlook(self) -> Outlook:
        view = self._standing.view()
        expected = policy.expected_at(view, self._standing.own.step, self._standing.roster)
        slowest_s = max((peer.call_s for peer in view.all if peer.peer_id in expected), default=0.0)
        straggler_s = self._config.straggler_s
        return Outlook(
            expected,
            policy.known_at(view, self._standing.own.step),
            self._standing.roster,
            view.gone,
            wait_s=min(straggler_s + 2 * slowest_s, self._config.max_meeting_s),
            deadline_s=max(straggler_s, 2 * self._usual_s),
        )

    def _referral(self, join: pb.Join) -> pb.Dismissal | None:
        if join.step != self._standing.own.step or self._standing.own.state == LEFT:
            return pb.Dismissal(reason=f"this peer is at step {self._standing.own.step}")
        best = policy.leader_of(self._standing.view(), join.unreachable)
        if best is None or best.peer_id == self._standing.own.peer_id:
            return None
        return pb.Dismissal(reason="another peer leads", leader=self._standing.table.signed_of(best.peer_id))

    def _confirmed(self, view: View) -> Averaged | None:
        """The result that this peer holds, if another says that it was the one which led to the next step."""
        ballots = self._ballots
        if ballots.gradient is None or ballots.group is None:
            return None
        digest = ballots.accepted.digest
        if any(peer.step == self._standing.own.step + 1 and peer.result_digest == digest for peer in view.others):
            return Averaged(ballots.gradient, digest, ballots.group, self._usual_s)
        return None

    def _say_who_is_missed(self) -> None:
        view = self._standing.view()
        present = {peer.peer_id for peer in view.all}
        missed = sorted(set(self._standing.roster) - view.gone - present)
        _logger.warning(
            "step %d waits for a quorum of those who took the last one: nothing is heard of %d of %d peers (%s), which "
            "may have ended; `presume_gone_s` says for how long such peers count",
            self._standing.own.step + 1,
            len(missed),
            len(self._standing.roster),
            ", ".join(map(short_id, missed)) or "none",
        )

    def _has_shrunk(self, view: View) -> bool:
        """Somebody has left before the meeting, and nobody waits at it."""
        enough = policy.samples_at(view, self._standing.own.step) >= self._standing.own.target_batch_size
        return not enough and not any(
            peer.state == MEETING and peer.step == self._standing.own.step for peer in view.others
        )


def _number_of(peer_id: str, group: Group) -> int:
    if peer_id not in group.peer_ids:
        raise RequestRejected("the caller is no member of the group")
    return group.peer_ids.index(peer_id)
