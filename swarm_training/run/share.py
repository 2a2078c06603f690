"""One peer's share of a batch, and the steps that follow when the batch is complete."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from swarm_training.checkpoints.state_file import UnreadableState
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.evaluation.evaluation import Evaluation
from swarm_training.evaluation.evaluator import PendingEvaluation
from swarm_training.evaluation.policy import EvaluationHistory, evaluators_of
from swarm_training.meeting.attending import Averaged, WentBack
from swarm_training.optim.local_steps import InnerSteps, LocalSteps
from swarm_training.progress import policy
from swarm_training.run.meetings import NO_LOSS
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.state import TrainedState, require_finite
from swarm_training.run.transfer.receiving import OfferedState

PeerCalls = Generator[Coroutine[Any, Any, Any], Any, None]  # yields coroutines of the peer, receives their results
_NOT_FINITE = "gradients are not finite: %d samples are left out"
_logger = logging.getLogger(__name__)


class GradientAccumulator:
    """The gradients that one peer has accumulated since the last global step.

    Methods yield coroutines of the peer and expect their results to be sent back, so that the caller decides on which
    loop they run. Everything else, above all the optimizer's step, happens in the caller's thread.

    Attributes:
        last_group: ids of the peers that were averaged for the last step, in the order of the sum.
        last_batch_size: the number of samples in that average.
        last_loss: the mean loss before the step, over the samples of that average for which members have reported one;
            None: nobody has reported a loss.
    """

    def __init__(self, peer: TrainingPeer, state: TrainedState, evaluation: Evaluation | None = None) -> None:
        self.samples = 0
        self.last_group: tuple[str, ...] = ()
        self.last_batch_size = 0
        self.last_loss: float | None = None
        self._peer = peer
        self._state = state
        self._sum = torch.zeros(state.length)  # gradients times samples
        self._losses, self._loss_samples = NO_LOSS  # the sum of loss times samples, and the number of these samples
        self._computed = 0  # samples since the last call of ``report``
        self.evaluation = evaluation

    def add(self, samples: int, loss: float | None = None) -> None:
        """Take the parameters' gradients, which are means over ``samples`` samples, like ``loss``. Gradients that are
        not finite are left out, but a loss that is not finite counts, because it may cause a rollback."""
        is_taken = self._take(samples)
        if loss is not None and (is_taken or not isfinite(loss)):
            self._losses += loss * samples if isfinite(loss) else inf
            self._loss_samples += samples
        self._computed += samples if is_taken else 0

    def report(self) -> PeerCalls:
        """Publish the progress, and step together with the other peers if the batch is complete."""
        yield from self._measure()
        yield self._tell()
        yield from self.catch_up()

    def catch_up(self) -> PeerCalls:
        while (yield self._peer.is_due()):
            if (yield self._peer.is_lost()):
                yield from self.load()
                continue
            decided = yield self._peer.average(self._contribution())
            if decided is not None:
                losses = self._losses, self._loss_samples
                self._clear()
                yield from self._apply(decided, losses)

    def found(self, resumed_at: Moment | None, addresses: Sequence[str], evaluations: EvaluationHistory) -> PeerCalls:
        """Found the run with the present state, which is that of the checkpoint of ``resumed_at``, or of step 0.

        If that checkpoint or the ledger shows that the run is not new, this peer first waits for other peers, and goes
        on from a newer checkpoint if they offer one. ``addresses``: the addresses by which they join.
        ``evaluations``: see ``TrainingPeer.found``."""
        if resumed_at is not None or self._peer.ledger.newest is not None:
            yield self._peer.await_offers(addresses)
            newer = yield from self._load_newer(resumed_at or Moment(0, 0))
            if newer is not None:
                resumed_at, evaluations = newer.moment, newer.evaluations
        yield self._peer.found(self._state.digest(), resumed_at, evaluations=evaluations)

    def _load_newer(self, own: Moment) -> Generator[Coroutine[Any, Any, Any], Any, OfferedState | None]:
        """Take over the newest state that peers offer, and return it; None if none is newer than moment ``own``."""
        refused: set[bytes] = set()
        while True:
            newer: OfferedState | None = yield self._peer.downloads.newest_offered(own, refused)
            if newer is None:
                return None
            step = newer.moment.step
            try:
                self._load_offered(newer)
            except ValueError as error:
                _logger.warning("the checkpoint of step %d that a peer offers is not used: %s", step, error)
                refused.add(newer.digest)
                continue
            _logger.warning("the run goes on from the checkpoint of step %d, which another peer has", step)
            return newer

    def _load_offered(self, newer: OfferedState) -> None:
        """Take over an offered state.

        Raises:
            ValueError: it cannot be used, and nothing has changed.
            UnreadableState: its file failed while it was taken over, so that the present state is a mixture of two.
                No run may be founded on a mixture.
        """
        try:
            require_finite(newer.data)
        except UnreadableState as error:
            raise ValueError(str(error)) from None
        self._state.load(newer.moment, newer.data)

    def load(self) -> PeerCalls:
        """Take over the state that most other peers have, and drop the gradients, which belong to an older state. Raise
        UnreadableState as ``TrainedState.load`` does."""
        downloaded = yield self._peer.downloads.newest()
        if downloaded is None:
            return
        try:
            self._state.load(downloaded.arrival.moment, downloaded.data)
        except ValueError as error:
            yield self._peer.downloads.refuse(downloaded, error)
            return
        self._clear()
        digest = self._state.digest()
        if (yield self._peer.loaded(downloaded, digest)):
            self._peer.checkpoints.keep(digest)

    def _take(self, samples: int) -> bool:
        """Take the gradients. Return False if they are left out, because numbers are not finite."""
        part = torch.zeros_like(self._sum)
        self._state.add_gradients(part, samples)
        if not bool(torch.isfinite(part).all()):
            _logger.warning(_NOT_FINITE, samples)
            return False
        self._sum += part
        self.samples += samples
        return True

    def _contribution(self) -> Tensor:
        """Return the vector that is averaged, weighted by ``samples``."""
        return self._sum / max(self.samples, 1)

    def _tell(self) -> Coroutine[Any, Any, None]:
        return self._peer.report(self.samples, self._losses / max(self._loss_samples, 1), self._loss_samples)

    def _measure(self) -> PeerCalls:
        computed, self._computed = self._computed, 0
        yield self._peer.measure(computed)

    def _apply(self, decided: Averaged | WentBack, losses: tuple[float, int]) -> PeerCalls:
        """Apply the average or go back. ``losses``: the sum over this peer's averaged samples, and their number."""
        if isinstance(decided, WentBack):
            yield from self._go_back(decided)
            return
        self._state.apply(decided.gradient)
        self.last_group = decided.group.peer_ids
        self.last_batch_size = sum(member.weight for member in decided.group.members)
        members = decided.group.members
        most = max(member.weight for member in members)  # the group's limit applies to weights
        self.last_loss = policy.mean_loss((member.record for member in members), most)
        total, samples = losses
        digest = self._state.digest()
        self._peer.checkpoints.keep(digest)
        yield self._peer.stepped(decided, digest, total / max(samples, 1), samples)
        yield from self._evaluate()

    def _evaluate(self) -> PeerCalls:
        """Hold the parameters of this step if it is evaluated, and this peer may have to do it."""
        peer, moment = self._peer, self._state.moment
        if self.evaluation is None or peer.own.has_ended or not peer.evaluator.is_due(moment.step):
            return
        evaluators = evaluators_of(peer.own.run, moment, self.last_group)
        is_one = peer.own.peer_id in evaluators
        held = self.evaluation.snapshot(self._state.shared_parameters) if is_one else None
        yield peer.evaluate(PendingEvaluation(moment, evaluators, held))

    def _go_back(self, back: WentBack) -> PeerCalls:
        """Take over the checkpoint, and drop the gradients of the abandoned moment."""
        self._clear()
        self._state.go_to(back.group.next_moment, back.state)
        digest = self._state.digest()
        self._peer.checkpoints.keep(digest)
        yield self._peer.went_back(back, digest)

    def _clear(self) -> None:
        self._sum.zero_()
        self.samples = 0
        self._losses, self._loss_samples = NO_LOSS


class DelayedShare(GradientAccumulator):
    """A share whose gradients are averaged while the next one is accumulated, see ``TrainingConfig.delay``."""

    _given: Tensor | None = None  # the part of this share that is being averaged, in the form for ``_take_back``
    _given_samples = 0
    _given_losses = NO_LOSS

    def report(self) -> PeerCalls:
        yield from self._measure()
        if self._given is not None:
            # Once the next share has as many samples, this peer waits: its updates are delayed by one step at most.
            if self.samples < self._given_samples and not (yield self._peer.has_averaged()):
                return
            yield from self._finish()
        yield self._tell()
        yield from self.catch_up()

    def catch_up(self) -> PeerCalls:
        """Start averaging if the batch is complete, without waiting for the result."""
        while (yield self._peer.is_due()):
            if (yield self._peer.is_lost()):
                yield from self.load()
                continue
            contribution = self._contribution()
            self._given, self._given_samples = self._given_for(contribution), self.samples
            self._given_losses = self._losses, self._loss_samples
            self._clear()
            yield self._peer.start_averaging(contribution)
            return

    def _finish(self) -> PeerCalls:
        """Apply the average. If the peers have not agreed on one, take the given part back into this share."""
        decided = yield self._peer.averaged()
        assert self._given is not None
        given, self._given = self._given, None
        if decided is not None:
            yield from self._apply_late(decided, given)
            return
        self._take_back(given)
        self.samples += self._given_samples
        self._losses += self._given_losses[0]
        self._loss_samples += self._given_losses[1]

    def _given_for(self, contribution: Tensor) -> Tensor:
        return self._sum.clone()

    def _apply_late(self, decided: Averaged | WentBack, given: Tensor) -> PeerCalls:
        yield from self._apply(decided, self._given_losses)

    def _take_back(self, given: Tensor) -> None:
        self._sum += given


class LocalShare(GradientAccumulator):
    """A share that steps by itself, see ``LocalSteps``. Peers average the distances of their parameters from the shared
    ones (the *pseudo-gradients* of DiLoCo) in place of gradients.

    A peer that comes too late by one global step brings its local steps into the next one, unless the other peers may
    have counted them already. Older steps are dropped, as gradients are.
    """

    def __init__(
        self,
        peer: TrainingPeer,
        state: TrainedState,
        local: LocalSteps,
        max_norm: float = 0.0,
        evaluation: Evaluation | None = None,
    ) -> None:
        super().__init__(peer, state, evaluation)
        self._sum = torch.zeros(0)  # the sum of the steps is in the parameters
        self._inner = InnerSteps(local, state.parameters, max_norm)
        self._may_be_counted = False  # whether others may have averaged the local steps without this peer's knowledge

    def load(self) -> PeerCalls:
        before, kept = self._peer.own, (self.samples, self._losses, self._loss_samples)
        is_whole = self.samples > 0 and self._losses < inf and not self._may_be_counted
        drift = self._state.drift() if is_whole else None
        yield from super().load()
        now = self._peer.own
        if (now.moment, now.state_digest) == (before.moment, before.state_digest):  # no state was accepted
            return
        if drift is None or now.moment != replace(before.moment, step=before.step + 1):
            self._inner.forget()
            return
        self._state.restore(drift)
        self.samples, self._losses, self._loss_samples = kept
        yield self._tell()

    def withdraw(self) -> None:
        """Undo all local steps since the last global step."""
        self._clear()
        self._inner.forget()
        self._state.restore()

    def _take(self, samples: int) -> bool:
        if not self._inner.take(samples):
            _logger.warning(_NOT_FINITE, samples)
            return False
        self.samples += (stepped := self._inner.step())
        if stepped and not all(bool(torch.isfinite(each).all()) for each in self._state.parameters):
            _logger.warning("a local step led to parameters that are not finite: %d samples are left out", self.samples)
            self.withdraw()
            return False
        return True

    def _contribution(self) -> Tensor:
        self._may_be_counted = True
        return self._state.drift()

    def _go_back(self, back: WentBack) -> PeerCalls:
        self._inner.forget()
        yield from super()._go_back(back)

    def _clear(self) -> None:
        super()._clear()
        self._may_be_counted = False


class DelayedLocalShare(DelayedShare, LocalShare):
    """A share that goes on with local steps while earlier ones are averaged.

    When the average is applied, the parameters become the shared ones plus the steps that the average does not have.
    """

    def withdraw(self) -> None:
        """Undo all local steps that are not being averaged."""
        super().withdraw()
        if self._given is not None:
            self._state.restore(self._given)

    def _given_for(self, contribution: Tensor) -> Tensor:
        return contribution

    def _apply_late(self, decided: Averaged | WentBack, given: Tensor) -> PeerCalls:
        later = self._state.drift() - given  # the steps since the average began; applying it resets the parameters
        yield from super()._apply_late(decided, given)
        if isinstance(decided, Averaged):
            self._state.restore(later)

    def _take_back(self, given: Tensor) -> None:
        """Leave the steps in the parameters, where they are. Other peers may have counted them."""
        self._may_be_counted = True


def make_share(
    peer: TrainingPeer,
    state: TrainedState,
    config: TrainingConfig,
    local: LocalSteps | None,
    evaluation: Evaluation | None = None,
) -> GradientAccumulator:
    """Return the share of a peer that averages with a delay, or takes local steps, or does neither."""
    if local is not None:
        kind = DelayedLocalShare if config.delay else LocalShare
        return kind(peer, state, local, config.max_norm, evaluation)
    return (DelayedShare if config.delay else GradientAccumulator)(peer, state, evaluation)
