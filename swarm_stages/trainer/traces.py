"""What went through the stages for a micro-batch: with it, one stage alone can be replayed.

Weights do not change within a step, so the inputs of a stage and the gradient of its output are right until its end,
whoever computed them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from swarm_stages.trainer.batches import Content


@dataclass
class Loss:
    """Of a micro-batch: the sum over so many tokens; none as long as the last stage has not computed it."""

    loss_sum: float = 0.0
    num_tokens: int = 0


@dataclass
class Trace:
    """Of one micro-batch in one step.

    Attributes:
        inputs: by stage: what goes into it.
        grads: by stage: the gradient of what comes out of it.
        kept_by: by stage: the peer that has computed it forward, and has kept the graph of it if there was room.
    """

    content: Content
    inputs: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)
    kept_by: dict[int, str] = field(default_factory=dict)
    loss: Loss = field(default_factory=Loss)

    @property
    def size_bytes(self) -> int:
        return sum(each.nbytes for each in (*self.inputs.values(), *self.grads.values()))


class Traces:
    """Of one step; the tensors of those used first are dropped when they take too much room."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._traces: dict[int, Trace] = {}

    def get(self, number: int) -> Trace | None:
        return self._traces.get(number)

    def keep(self, number: int, trace: Trace) -> None:
        self._traces.pop(number, None)
        self._traces[number] = trace
        left = sum(each.size_bytes for each in self._traces.values()) - self._max_bytes
        for oldest in list(self._traces):
            if left <= 0:
                return
            left -= self._traces.pop(oldest).size_bytes


def backwards_needed(lacking: frozenset[int], known_grads: frozenset[int], num_stages: int) -> list[int]:
    """The stages whose backward is to be computed, in this order: those that lack the micro-batch, and later ones as
    far as the gradients of their inputs are not known. ``known_grads``: stages the gradient of whose output is known.
    """
    needed: list[int] = []
    for stage in range(num_stages):
        has_grad_from = stage - 1  # its backward gives the gradient of what comes out of the stage before
        if stage in lacking or (has_grad_from in needed and has_grad_from not in known_grads):
            needed.append(stage)
    return needed[::-1]
