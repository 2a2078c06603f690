"""The losses of a run as a process knows them: the curve for its checkpoints, and what it says of held-out data."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from swarm_training.core.callbacks import Say
from swarm_training.core.record import HeldOutLoss
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.losses.curve import HELD_OUT, TRAINING, LossCurve


class KnownLosses:
    """The losses of one run: the curve of all of them, and those on held-out data."""

    def __init__(self, say: Say) -> None:
        self.curve = LossCurve()
        self.held_out = EvaluationHistory()
        self._say = say

    def begin(self, curve: LossCurve, step: int, held_out: EvaluationHistory) -> None:
        """Begin with a curve up to a step, and with losses on held-out data that became known after its last point."""
        self.curve, self.held_out = curve, held_out
        self.curve.discard_after(step)
        points = self.curve.series.get(HELD_OUT)
        last = points[-1][0] if points else 0
        for each in self.held_out.losses:
            if each.step > last:
                self.curve.add(each.step, {HELD_OUT: each.loss})

    def stepped(self, step: int, loss: float | None) -> None:
        """Add the training loss of a step; None: it is not known."""
        self.curve.add(step, {TRAINING: loss})

    def evaluated(self, known: EvaluationHistory) -> bool:
        """Take over the losses on held-out data, and say which are new. Return whether anything has changed."""
        if known == self.held_out:
            return False
        new = [each for each in known.losses if each not in self.held_out.losses]
        for each in new:
            lowest = ", the lowest so far" if each == known.best else ""
            self._say(f"step {each.step}: loss on held-out data {each.loss:.4f}{lowest}")
        self._add(new)
        self.held_out = known
        return True

    def _add(self, new: Sequence[HeldOutLoss]) -> None:
        """Add losses on held-out data to the curve. The points of later steps stay."""
        points = dict(self.curve.series.get(HELD_OUT, ())) | {each.step: each.loss for each in new}
        first = min((each.step for each in new), default=inf)
        for step in sorted(step for step in points if step >= first):
            self.curve.add(step, {HELD_OUT: points[step]})
