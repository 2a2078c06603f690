"""What two peers have answered to the same request: whether it is the same, and who is wrong. Pure, but for tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm_stages.audit.sketch import relative_difference, relative_distance

_TOLERANCES = {"fp32": 1e-2, "bf16": 1e-1}  # by precision of computing: threads and processors change 1e-7 or 1e-2
_WIRE = {"int8": 3e-2, "bf16": 1e-2}  # a number between two steps of the grid may be rounded up here and down there


@dataclass(frozen=True)
class Tolerance:
    """Relative.

    Attributes:
        gradients: of weights.
        answers: of tensors that come over the wire.
    """

    gradients: float
    answers: float

    @classmethod
    def of(cls, precision: str, form: str) -> Tolerance:
        """``precision``: of computing. ``form``: in which the answer travels."""
        computing = _TOLERANCES[precision]
        return cls(computing, max(computing, _WIRE.get(form, 0.0)))


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        tensor: the output of a forward pass, or the gradient of the input; None if none was asked for.
        loss_sum, num_tokens: of the last stage.
    """

    tensor: Tensor | None = None
    loss_sum: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True)
class Testimony:
    """``sketch``: of the gradient of the weights; empty if none was to be kept."""

    peer_id: str
    answer: Answer
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
    """Those more than half of all, and two at least, that agree with one of them; empty if there are none."""
    for one in testimonies:
        found = [other for other in testimonies if other is one or agree(one, other, tolerance)]
        if len(found) > max(1, len(testimonies) // 2):
            return found
    return []
