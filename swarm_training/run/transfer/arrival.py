"""The way in which a run has come to a moment, which travels with the state."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_training.core.moment import Moment
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.rollback.divergence import LossHistory


@dataclass(frozen=True)
class Arrival:
    """A moment of a run, and the decision that led to it.

    Attributes:
        roster: ids of the peers that decided it and can be reached.
        result_digest: the digest of the average that led to the moment, or of the rollback.
        history: the losses up to the moment, by which the next loss is judged.
        went_back_to: the step of the last rollback's checkpoint; 0 if there was none.
        global_squared_norm: see ``Progress``.
        evaluations: the losses on held-out data that groups have agreed on up to the moment.
        has_ended: whether the moment is the last one of the run.
    """

    moment: Moment
    roster: tuple[str, ...]
    result_digest: bytes
    history: LossHistory = field(default_factory=LossHistory)
    went_back_to: int = 0
    global_squared_norm: float | None = None
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    has_ended: bool = False
