"""The comparison of peers' answers to one request: which agree, and which are wrong. Pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_training.stages.audit.sketch import relative_difference, relative_distance
from swarm_training.stages.rpc.answers import StageAnswer

_TOLERANCES = {"fp32": 1e-2, "bf16": 1e-1}  # by precision: threads and processors change 1e-7 (fp32) or 1e-2 (bf16)
_WIRE = {"int8": 3e-2, "bf16": 1e-2}  # one peer may round a number up to the next grid step, and another one down


@dataclass(frozen=True)
class Tolerance:
    """The relative differences within which two answers agree."""

    gradients: float  # the tolerance for gradients of weights, and for the loss
    answers: float  # the tolerance for tensors that come over the wire

    @classmethod
    def of(cls, precision: str, form: str) -> Tolerance:
        """Return the tolerances. ``precision``: that of computing. ``form``: the form in which the answer travels."""
        computing = _TOLERANCES[precision]
        return cls(computing, max(computing, _WIRE.get(form, 0.0)))


@dataclass(frozen=True)
class Testimony:
    """A peer's answer, with a sketch of the gradient of the weights; the sketch is empty if none was to be kept."""

    peer_id: str
    answer: StageAnswer
    sketch: tuple[float, ...] = ()


def agree(one: Testimony, other: Testimony, tolerance: Tolerance) -> bool:
    a, b = one.answer, other.answer
    if (a.tensor is None) != (b.tensor is None) or a.num_tokens != b.num_tokens:
        return False
    if not math.isclose(a.loss_sum, b.loss_sum, rel_tol=tolerance.gradients):
        return False
    if relative_difference(one.sketch, other.sketch) > tolerance.gradients:
        return False
    return a.tensor is None or b.tensor is None or relative_distance(a.tensor, b.tensor) <= tolerance.answers


def majority(testimonies: Sequence[Testimony], tolerance: Tolerance) -> list[Testimony]:
    """Return the testimonies that agree with one of them, if they are two or more and above half of all; else none."""
    for one in testimonies:
        found = [other for other in testimonies if other is one or agree(one, other, tolerance)]
        if len(found) > max(1, len(testimonies) // 2):
            return found
    return []
