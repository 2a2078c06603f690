"""The decisions about evaluations: which peer computes a loss, which losses count, and whether the run ends. No I/O.

An evaluation belongs to the group that took the step. Its members come in an order that follows from their ids, and
the first one that is present computes the loss. A few hold the parameters of the step for that, so that another can go
on if the first one dies, while all train on.

A loss counts once a group has agreed on it together with an average. All peers then have the same history of losses at
the same moment, from which it follows for all of them at once that the run ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from swarm_training.core.config import EvaluationPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.record import HeldOutLoss, Progress
from swarm_training.progress.policy import has_quorum, rank

if TYPE_CHECKING:
    from swarm_training.pb import training_pb2 as pb

NUM_EVALUATORS = 3  # that hold the parameters of an evaluated step
MOST_SPARED = 3  # checkpoints that stay for evaluations, see ``steps_to_keep``
MAX_LOSSES = 4096  # a joiner receives all of them in one message


@dataclass(frozen=True)
class EvaluationHistory:
    """The losses on held-out data that groups have agreed on, oldest first: at most the newest ``MAX_LOSSES``."""

    losses: tuple[HeldOutLoss, ...] = ()

    @classmethod
    def of(cls, losses: Iterable[HeldOutLoss]) -> EvaluationHistory:
        """Return the history of some losses in any order. A later loss of the same step replaces the earlier one."""
        by_step = {each.step: each for each in sorted(losses, key=lambda each: each.moment) if each.samples}
        return cls(tuple(by_step[step] for step in sorted(by_step))[-MAX_LOSSES:])

    @property
    def newest(self) -> HeldOutLoss | None:
        return self.losses[-1] if self.losses else None

    @property
    def best(self) -> HeldOutLoss | None:
        """Return the lowest loss, the earliest of equal ones; None if there is none, or none is finite."""
        return min((each for each in self.losses if each.loss < inf), key=lambda each: each.loss, default=None)

    def up_to(self, step: int) -> EvaluationHistory:
        """Return the history without the losses of later steps, which a rollback has undone."""
        return EvaluationHistory(tuple(each for each in self.losses if each.step <= step))

    def observed(self, policy: EvaluationPolicy, now: Moment, found: Iterable[HeldOutLoss]) -> EvaluationHistory:
        """Return the history after a group has agreed on the losses in ``found`` at a moment. Losses that do not count
        are left out, see ``counts``."""
        new = [each for each in found if counts(policy, self, now, each)]
        return EvaluationHistory.of((*self.losses, *new)) if new else self


def counts(policy: EvaluationPolicy, history: EvaluationHistory, now: Moment, loss: HeldOutLoss) -> bool:
    """Return whether a loss can be the next one of a run that has come to the moment ``now``."""
    is_due = policy.is_due(loss.step)
    is_newer = history.newest is None or loss.step > history.newest.step
    return is_due and is_newer and loss.samples > 0 and loss.moment.rollbacks == now.rollbacks and loss.moment <= now


def misses(policy: EvaluationPolicy, history: EvaluationHistory) -> int:
    """Return the number of evaluations in a row, up to the newest, that have not improved the loss."""
    lowest, missed = inf, 0
    for each in history.losses:
        if each.loss < lowest - policy.least_improvement:
            lowest, missed = each.loss, 0
        else:
            missed += 1
    return missed


def reason_to_end(policy: EvaluationPolicy, history: EvaluationHistory) -> str:
    """Return why the run must end now; an empty text if it goes on."""
    if not policy.patience or misses(policy, history) < policy.patience:
        return ""
    by = f" by {policy.least_improvement:g}" if policy.least_improvement else ""
    best = history.best
    lowest = "it has never been finite" if best is None else f"the lowest is {best.loss:.4g}, of step {best.step}"
    return f"the loss on held-out data has not fallen{by} in {policy.patience} evaluations: {lowest}"


def shown_losses(now: Moment, records: Iterable[Progress]) -> EvaluationHistory:
    """Return the newest and the lowest losses on held-out data in records of a run that has come to the moment ``now``.
    Losses that nobody has agreed on yet count too, but not those of steps that the run has undone."""
    found: list[HeldOutLoss | None] = []
    for record in records:
        if record.rollbacks == now.rollbacks:
            found += [record.newest_held_out, record.best_held_out]
        if record.held_out is not None and record.held_out.moment.rollbacks == now.rollbacks:
            found.append(record.held_out)
    return EvaluationHistory.of(loss for loss in found if loss is not None)


def evaluators_of(run: str, moment: Moment, members: Iterable[str]) -> tuple[str, ...]:
    """Return the ids of the members that hold the parameters of a step to evaluate them, the first to do it first."""
    ordered = sorted(members, key=lambda peer_id: rank(f"{run}/evaluation", moment, peer_id))
    return tuple(ordered[:NUM_EVALUATORS])


def whose_turn(evaluators: Sequence[str], moment: Moment, present: Iterable[Progress]) -> str | None:
    """Return the first evaluator that is present and has not failed to evaluate this moment; None if nobody is left."""
    by_id = {record.peer_id: record for record in present}
    for peer_id in evaluators:
        record = by_id.get(peer_id)
        if record is not None and (record.held_out is None or not _failed(record.held_out, moment)):
            return peer_id
    return None


def _failed(loss: HeldOutLoss, moment: Moment) -> bool:
    return loss.moment == moment and not loss.samples


def is_known(moment: Moment, history: EvaluationHistory, records: Iterable[Progress]) -> bool:
    """Return whether some peer has evaluated this moment, or the run has agreed on a later loss."""
    if history.newest is not None and history.newest.moment >= moment:
        return True
    found = (record.held_out for record in records)
    return any(loss is not None and loss.moment == moment and loss.samples > 0 for loss in found)


def to_agree_on(
    policy: EvaluationPolicy,
    history: EvaluationHistory,
    now: Moment,
    evaluated: Iterable[tuple[Progress, pb.SignedProgress]],
    most: int,
) -> list[pb.SignedProgress]:
    """Return the signed records on whose losses the next group should agree: one of each step, the newest ``most``.

    ``evaluated``: records, and the same as signed. If several peers have evaluated a step, the first by id counts.
    """
    by_step: dict[int, pb.SignedProgress] = {}
    for record, signed in sorted(evaluated, key=lambda each: each[0].peer_id, reverse=True):
        if record.held_out is not None and counts(policy, history, now, record.held_out):
            by_step[record.held_out.step] = signed
    return [by_step[step] for step in sorted(by_step)[-most:]]


def have_ended(own: Progress, roster: Collection[str], ended: Iterable[Progress]) -> bool:
    """Return whether others have ended the run at a later moment than this peer's.

    A quorum of the roster must say it, or half of the roster without this peer. A single peer of several cannot.
    ``roster``: the ids of the peers that decide about this peer's next step. ``ended``: the records that say it.
    """
    enders = {record.peer_id for record in ended if record.moment > own.moment}
    others = set(roster) - {own.peer_id}
    return bool(enders) and (has_quorum(enders, roster, ()) or 2 * len(enders & others) >= max(1, len(others)))


def steps_to_keep(policy: EvaluationPolicy, history: EvaluationHistory, step: int) -> frozenset[int]:
    """Return the steps whose checkpoints stay beside the newest ones: that of the lowest loss, and those of the two
    newest evaluations due by ``step`` whose losses may not be known yet."""
    best, newest = history.best, history.newest
    known = 0 if newest is None else newest.step
    last = step - step % policy.every if policy.every else 0
    unknown = {each for each in (last, last - policy.every) if each > known}
    return frozenset(unknown if best is None else unknown | {best.step})
