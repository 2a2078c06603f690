"""One peer's part in the evaluations of its run: it waits for its turn, computes the loss in a thread, publishes it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from swarm_protocol.failures import logged_errors
from swarm_training.averaging.group import MAX_EVALUATIONS, Group
from swarm_training.core.callbacks import InThread
from swarm_training.core.config import EvaluationPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.record import HeldOutLoss, Progress
from swarm_training.evaluation import policy as decisions
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.policy import LocalView

_LOOK_S = 0.5  # between two looks at whose turn it is
_logger = logging.getLogger(__name__)


class HeldParameters(Protocol):
    """The parameters of one step, with which this peer can compute the loss: a ``Snapshot``, or those of all stages."""

    async def computed(self, in_thread: InThread) -> tuple[float, int]:
        """Return the mean loss and the number of samples. ``in_thread``: calls a function in a thread."""


class EvaluatedPeer(Protocol):
    """The peer to which an evaluator belongs."""

    def view(self) -> LocalView: ...

    def evaluated(self) -> list[tuple[Progress, pb.SignedProgress]]:
        """Return all records with a loss on held-out data."""

    def publish_held_out(self, loss: HeldOutLoss) -> None: ...


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation whose loss is not known yet. ``held``: None if this peer cannot compute it."""

    moment: Moment
    evaluators: tuple[str, ...]
    held: HeldParameters | None


class Evaluator:
    """The evaluations of one peer's run."""

    def __init__(self, policy: EvaluationPolicy, peer: EvaluatedPeer, in_thread: InThread) -> None:
        self.policy = policy
        self.history = EvaluationHistory()  # the losses that groups have agreed on
        self.reason_to_end = ""  # why the run has ended; empty while it goes on
        self._peer = peer
        self._in_thread = in_thread
        self._pending: PendingEvaluation | None = None
        self._news = asyncio.Event()

    def is_due(self, step: int) -> bool:
        return self.policy.is_due(step)

    def to_agree_on(self, now: Moment) -> list[pb.SignedProgress]:
        """Return the signed records with the losses on which the next group should agree."""
        if not self.policy.every:
            return []
        return decisions.to_agree_on(self.policy, self.history, now, self._peer.evaluated(), MAX_EVALUATIONS)

    def known(self) -> EvaluationHistory:
        """Return the history with the losses that peers have published and no group has agreed on yet."""
        now = self._peer.view().own.moment
        found = [record.held_out for record, _ in self._peer.evaluated() if record.held_out is not None]
        return self.history.observed(self.policy, now, found)

    def averaged(self, group: Group) -> None:
        """Record that the group has averaged, and agreed on losses; find out whether the run ends with this step."""
        self.history = self.history.observed(self.policy, group.moment, group.held_out_losses)
        if group.held_out_losses:
            self.reason_to_end = decisions.reason_to_end(self.policy, self.history)

    def took_over(self, history: EvaluationHistory, *, has_ended: bool = False) -> None:
        """Take over the history of another peer, or the one after a rollback."""
        self.history = history
        self.reason_to_end = ""
        if has_ended:
            self.reason_to_end = decisions.reason_to_end(self.policy, history) or "the other peers have ended it"
        self.begin(None)

    def begin(self, pending: PendingEvaluation | None) -> None:
        """Begin an evaluation, or none. An earlier one that this peer does not compute already is given up."""
        self._pending = pending
        self._news.set()

    def is_pending(self) -> bool:
        """Return whether a loss is awaited that some peer can still compute."""
        pending = self._pending
        return pending is not None and not self._is_settled(pending)

    async def settled(self) -> None:
        """Wait until no loss is awaited."""
        while self.is_pending():
            await asyncio.sleep(_LOOK_S)

    async def run(self) -> None:
        """Compute losses, one after the other, while it is this peer's turn."""
        while True:
            await self._news.wait()
            self._news.clear()
            if (pending := self._pending) is not None:
                await self._attend(pending)

    async def _attend(self, pending: PendingEvaluation) -> None:
        """Wait for this peer's turn, and compute the loss then, unless it is not needed any more."""
        while self._pending is pending and not self._is_settled(pending):
            view = self._peer.view()
            turn = decisions.whose_turn(pending.evaluators, pending.moment, view.all)
            if pending.held is not None and turn == view.own.peer_id:
                self._peer.publish_held_out(await self._computed(pending.moment, pending.held))
            else:
                await asyncio.sleep(_LOOK_S)
        if self._pending is pending:
            self._pending = None  # the parameters are not needed any more

    def _is_settled(self, pending: PendingEvaluation) -> bool:
        records = [record for record, _ in self._peer.evaluated()]
        if decisions.is_known(pending.moment, self.history, records):
            return True
        return decisions.whose_turn(pending.evaluators, pending.moment, self._peer.view().all) is None

    async def _computed(self, moment: Moment, held: HeldParameters) -> HeldOutLoss:
        loss, samples = 0.0, 0
        failed = "the loss on held-out data of step %d cannot be computed here"
        with logged_errors(_logger, failed, moment.step, level=logging.WARNING):  # of the caller's function
            loss, samples = await held.computed(self._in_thread)
        return HeldOutLoss(moment, loss, samples)
