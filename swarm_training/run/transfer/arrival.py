"""The decision by which a run came to a moment. It travels with the state of that moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_training.core.moment import Moment
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.rollback.divergence import LossHistory


@dataclass(frozen=True)
class Arrival:
    """A moment of a run, and the decision that led to it."""

    moment: Moment
    roster: tuple[str, ...]  # ids of the peers that took the decision and can be reached
    result_digest: bytes  # the digest of the average that led to the moment, or of the rollback
    # The losses up to the moment, by which the next loss is judged.
    history: LossHistory = field(default_factory=LossHistory)
    went_back_to: int = 0  # the step of the last rollback's checkpoint; 0 if there was none
    global_squared_norm: float | None = None  # see ``Progress``
    # The losses on held-out data that groups have agreed on up to the moment.
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    has_ended: bool = False  # whether the moment is the last one of the run
