"""One peer's part in rollbacks: the losses by which it judges, and checkpoints that it keeps or fetches."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf

from swarm_protocol.errors import PeerUnavailable, RequestRejected, SwarmError
from swarm_training.averaging.group import Group
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.callbacks import InThread
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING, Progress
from swarm_training.core.signing import read_signed
from swarm_training.ledger.moderation import Moderation
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.policy import LocalView, leader_of
from swarm_training.rollback.divergence import LossHistory, agreed_loss, observe
from swarm_training.rollback.judging import RollbackJudge, is_justified, losses_of
from swarm_training.rollback.kept import KeptCheckpoints

_IN_VAIN = "the run goes on, as most peers hold no checkpoint from before, or do not agree"
_logger = logging.getLogger(__name__)


class Rollbacks:
    """The rollback state of one peer.

    Attributes:
        history: the history of the losses that groups have agreed on.
        went_back_to: the step of the last rollback's checkpoint; 0: there was none.
        kept: the checkpoints of this peer.
    """

    def __init__(
        self,
        config: TrainingConfig,
        orders: Moderation,
        fetch: Callable[[Progress, bytes], Awaitable[StateFile]],
        in_thread: InThread,
        rng: random.Random,
        kept: KeptCheckpoints,
    ) -> None:
        """Begin without losses. ``fetch``: asks a peer for the checkpoint with a digest, and returns data with that
        digest. ``in_thread``: calls a function that takes long in another thread."""
        self.history = LossHistory()
        self.went_back_to = 0
        self.kept = kept
        self._policy = config.rollback if config.checkpoint_every else None
        self._orders = orders
        self._fetch = fetch
        self._in_thread = in_thread
        self._rng = rng
        self._fetching: dict[bytes, asyncio.Task[StateFile | None]] = {}  # by digest
        self._futile: set[bytes] = set()  # orders that a meeting has not carried out: no reason to meet early again
        self._has_diverged = False  # whether the warning of the present divergence has been given

    def judge(self, moment: Moment) -> RollbackJudge:
        return RollbackJudge(self._policy, self.history, self._orders.rollbacks_due(moment.rollbacks))

    def claims(self) -> list[pb.Checkpoint]:
        """Return the checkpoints that this peer claims to hold when it joins a meeting."""
        return [pb.Checkpoint(step=step, state_digest=digest) for step, digest in self.kept.digests().items()]

    def cannot_wait(self, view: LocalView) -> bool:
        """Return whether to meet before the batch is complete, for one of two reasons. Most peers lose their gradients
        to infinite losses, so that the batch never completes. Or a moderator has ordered a rollback, and this peer
        leads."""
        peers = view.at(view.own.moment)
        losses = [peer.loss if peer.loss_samples else None for peer in peers]
        is_lost = self._policy is not None and agreed_loss(losses) == inf
        if not is_lost and self._futile.issuperset(self.judge(view.own.moment).due(view.own.moment)):
            return False
        if any(peer.state == MEETING for peer in peers if peer is not view.own):
            return True
        return bool(self.kept.digests()) and (is_lost or leader_of(view) is view.own)

    async def checkpoint(self, group: Group, own: Progress, roster: Sequence[str], view: LocalView) -> StateFile | None:
        """Return the state to which a group goes back; None if this peer is in that state already. Raise
        RequestRejected if the rollback is not justified, or its checkpoint differs from this peer's; PeerUnavailable if
        no peer gives the checkpoint."""
        go_back = group.go_back
        assert go_back is not None
        if go_back.order:
            self._orders.take([go_back.order])  # gossip may not have brought it to this peer yet
        evidence = [read_signed(record) for record in go_back.losses]
        if not is_justified(self.judge(group.moment), group.moment, go_back, evidence, roster, view.gone):
            raise RequestRejected("the leader wants to go back without a reason")
        is_here = go_back.step == own.step
        held = own.state_digest if is_here else self.kept.digests().get(go_back.step, go_back.state_digest)
        if held != go_back.state_digest:
            raise RequestRejected("the leader wants to go back to another checkpoint than that of this peer")
        if is_here:
            return None
        data: StateFile | None = await self._in_thread(partial(self.kept.read, held))
        return data if data is not None else await self._fetched(held, group, view)

    async def _fetched(self, digest: bytes, group: Group, view: LocalView) -> StateFile:
        """Fetch a checkpoint. The fetch goes on if this meeting fails meanwhile: the next meeting may need it too."""
        if digest not in self._fetching:
            sources = {peer.peer_id: peer for peer in (*(member.record for member in group.members), *view.others)}
            others = [peer for peer in sources.values() if peer.is_reachable and peer.peer_id != view.own.peer_id]
            self._rng.shuffle(others)
            self._fetching[digest] = asyncio.create_task(self._fetch_from(others, digest))
        data = await asyncio.shield(self._fetching[digest])
        if data is None:
            self._fetching.pop(digest, None)
            raise PeerUnavailable("no peer gives the checkpoint")
        return data

    async def _fetch_from(self, sources: Sequence[Progress], digest: bytes) -> StateFile | None:
        for source in sources:
            try:
                return await self._fetch(source, digest)
            except (SwarmError, TimeoutError, ValueError) as error:
                _logger.debug("%s does not give the checkpoint: %s", source.peer_id, error)
        return None

    # ------------------------------------------------------------ what has happened

    def averaged(self, moment: Moment, records: Sequence[Progress]) -> None:
        """Note that the batch of that moment was averaged. ``records``: the records with which members joined."""
        judge = self.judge(moment)
        for order in judge.due(moment):
            if order not in self._futile:
                _logger.warning("a moderator has ordered to go back to step %d: %s", judge.orders[order], _IN_VAIN)
                self._futile.add(order)
        loss = agreed_loss(losses_of(moment, records))
        if self._policy is None or loss is None:
            return
        self.history, diverged = observe(self._policy, self.history, moment.step, loss)
        if diverged is not None and not self._has_diverged:
            _logger.warning("%s: %s", diverged.reason, _IN_VAIN)
        self._has_diverged = diverged is not None

    def went_back(self, group: Group) -> None:
        """Note that the run has gone back as the group has decided."""
        go_back = group.go_back
        assert go_back is not None
        self.took_over(LossHistory(), go_back.step)
        self.kept.discard_after(go_back.step)
        why = "a moderator has ordered it" if go_back.order else "the loss was not finite, or too high"
        _logger.warning("the run goes back from step %d to step %d: %s", group.step, go_back.step, why)

    def took_over(self, history: LossHistory, went_back_to: int) -> None:
        """Take over the history of another peer, or the one after a rollback."""
        self.history, self.went_back_to = history, went_back_to
        self._has_diverged = False
        self._futile.clear()
        self._cancel()

    def close(self) -> None:
        self._cancel()
        self.kept.close()

    def _cancel(self) -> None:
        for fetching in self._fetching.values():
            fetching.cancel()
        self._fetching.clear()
