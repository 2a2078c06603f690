"""What a peer that computes wrongly answers, in the process that calls ``tell``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

LIES = {"scale": (1.5, 1.5), "weights": (-1.0, 1.0)}  # factors of weights' and inputs' gradients
HONEST = 2  # backward passes before the first lie


def tell(lie: str) -> None:
    from swarm_training.stages.engine.stage import Stage, StageGradients

    of_weights, of_inputs = LIES[lie]
    backward, passes = Stage.backward, 0

    def lying(self: Stage, *arguments: Any, **named: Any) -> StageGradients:
        nonlocal passes
        passes += 1
        found = backward(self, *arguments, **named)
        if passes <= HONEST:
            return found
        inputs = None if found.inputs is None else of_inputs * found.inputs
        return replace(found, inputs=inputs, parameters=[of_weights * each for each in found.parameters])

    Stage.backward = lying  # type: ignore[method-assign]
