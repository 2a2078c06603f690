"""The evaluations of a run in stages on held-out data, as one peer of a stage takes part in them.

The last stage has the losses. Its peers do not average the gradients of an evaluated step before the loss is known, and
no stage steps without them. Hence all stages still have the weights of that step when the loss is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarm_protocol.errors import CheckpointError
from swarm_training.checkpoints.evaluations import read_evaluations, write_evaluations
from swarm_training.core.callbacks import InThread
from swarm_training.core.config import EvaluationPolicy
from swarm_training.core.moment import Moment
from swarm_training.evaluation import policy as decisions
from swarm_training.evaluation.evaluator import PendingEvaluation
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.rollback.kept import file_name
from swarm_training.rollback.stored import stage_directory
from swarm_training.run.peer import TrainingPeer
from swarm_training.stages.peer.watch import RunWatch

# Returns the mean loss on held-out data with the weights of all stages at this moment, and the number of samples.
HeldOutLossOf = Callable[[Moment], Awaitable[tuple[float, int]]]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightsOfStages:
    """The weights that all stages have at a moment: ``HeldParameters`` of a run in stages."""

    moment: Moment
    loss_of: HeldOutLossOf

    async def computed(self, in_thread: InThread) -> tuple[float, int]:
        return await self.loss_of(self.moment)


class StageEvaluation:
    """One peer's part in the evaluations of its run. All methods are for one event loop. ``known``: the known losses:
    at the last stage all of them, at other stages those that were once the lowest or the newest."""

    def __init__(self, index: int, peer: TrainingPeer, watch: RunWatch) -> None:
        self.known = EvaluationHistory()
        self._is_last = index == watch.num_stages - 1
        self._peer, self._watch = peer, watch
        self._directory = None if peer.stored.directory is None else stage_directory(peer.stored.directory, index)
        self._loss_of: HeldOutLossOf | None = None
        self._seen: Moment | None = None
        self._written = EvaluationHistory()

    def compute_by(self, loss_of: HeldOutLossOf) -> None:
        """Compute losses by this function."""
        self._loss_of = loss_of

    @property
    def reason_of_end(self) -> str:
        """Return why the run has ended; empty while it goes on."""
        if self._is_last:
            return self._peer.reason_of_end
        if not self._watch.view().has_ended:
            return ""
        return decisions.reason_to_end(self._policy, self.known) or "the last stage has ended it"

    @property
    def is_awaited(self) -> bool:
        """Return whether this peer's stage must wait for the loss of this step."""
        return self._is_last and self._peer.evaluator.is_pending()

    def resume(self, step: int, went_back_to: int = 0) -> EvaluationHistory:
        """Take over the losses up to this step that earlier processes have left on the disk, and return all that are
        known. Spare the checkpoints that stay for them. Call it when the peer has the state of this step.

        ``went_back_to``: the step of the run's last rollback, which has undone the losses of later steps.
        """
        if self._policy.every and self._directory is not None:
            earlier = EvaluationHistory.of((*self.known.losses, *self._stored().losses)).up_to(step)
            if earlier.newest is not None and earlier.newest.moment.rollbacks < self._peer.own.rollbacks:
                # They are from before the rollback.
                earlier = earlier.up_to(went_back_to)
            self.known = EvaluationHistory.of((*earlier.losses, *self._peer.evaluator.history.losses))
            self.spare(step)
        return self.known

    def _stored(self) -> EvaluationHistory:
        assert self._directory is not None
        try:
            return read_evaluations(self._directory, self._peer.own.run)
        except CheckpointError as error:
            _logger.warning("%s: the losses on held-out data are forgotten", error)
            return EvaluationHistory()

    def spare(self, step: int) -> None:
        """Spare the checkpoints that stay beside the newest ones. Call it where checkpoints are kept."""
        kept, best = self._peer.rollbacks.kept, self.known.best
        kept.spare(decisions.steps_to_keep(self._policy, self.known, step))
        if best is not None:
            kept.adopt_spared(best.moment)

    def follow(self) -> bool:
        """Take over what has become known, and begin the evaluation of the present moment if it is due. Return whether
        ``spare`` should be called."""
        if not self._policy.every:
            return False
        self.known = self._peer.evaluator.known() if self._is_last else self._shown()
        self._begin()
        best, own = self.known.best, self._peer.own
        self._peer.checkpoints.show_best(None if best is None else best.step)
        spared = decisions.steps_to_keep(self._policy, self.known, own.step)
        return spared != self._peer.rollbacks.kept.spared

    @property
    def is_unwritten(self) -> bool:
        """Return whether ``write`` should be called."""
        return self._directory is not None and self.known != self._written

    def write(self) -> None:
        """Write the known losses beside the checkpoints. This takes a while."""
        assert self._directory is not None
        known, kept = self.known, self._peer.rollbacks.kept
        best = None if known.best is None else kept.of(known.best.step)
        try:
            write_evaluations(self._directory, self._peer.own.run, known, None if best is None else file_name(best))
        except ValueError as error:
            _logger.warning("%s", error)
        self._written = known

    @property
    def _policy(self) -> EvaluationPolicy:
        return self._peer.evaluator.policy

    def _shown(self) -> EvaluationHistory:
        """Return what is known, and what records of the last stage show. A rollback undoes the losses of later steps.
        If the last stage is lost, what it has said counts."""
        own = self._peer.own
        known = (
            self.known if self._seen is None or own.rollbacks == self._seen.rollbacks else self.known.up_to(own.step)
        )
        self._seen = own.moment
        shown = decisions.shown_losses(own.moment, self._watch.records(self._watch.num_stages - 1))
        return EvaluationHistory.of((*known.losses, *shown.losses))

    def _begin(self) -> None:
        evaluator, own = self._peer.evaluator, self._peer.own
        if not self._is_last or own.moment == self._seen or own.has_ended:
            return
        self._seen = own.moment
        newest = evaluator.history.newest
        if not evaluator.is_due(own.step) or (newest is not None and newest.step >= own.step):
            return  # the loss is not wanted, or known: mates had it when this peer loaded their state
        assert self._loss_of is not None, "compute_by was not called"
        evaluators = decisions.evaluators_of(own.run, own.moment, self._peer.roster)
        held = WeightsOfStages(own.moment, self._loss_of) if own.peer_id in evaluators else None
        evaluator.begin(PendingEvaluation(own.moment, evaluators, held))
