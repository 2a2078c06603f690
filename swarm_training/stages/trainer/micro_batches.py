"""The content of micro-batches, and their traces through the stages, with which one stage alone can be replayed.

The content follows from run, step and number alone, so that any trainer can replay it. The inputs of a stage and the
gradient of its output serve until the end of the step, whichever peers computed them. Without local steps, weights do
not change meanwhile, so that both are exact. With local steps, both may be those of weights some local steps older.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from swarm_training.data.blocks import TokenBlocks
from swarm_training.data.order import SampleOrder, batch_of_step, derived_seed


@dataclass(frozen=True)
class Content:
    """The content of a micro-batch: token ids and labels, [rows, positions] int64."""

    ids: Tensor
    labels: Tensor


def loss_scale_of(rows: int, block_length: int) -> float:
    """Return the number of predicted tokens: all but the first one of each row."""
    return float(rows * (block_length - 1))


class BlockMicroBatches:
    """The micro-batches of a table of token blocks, in the order of the run: no row comes twice in an epoch.

    Attributes:
        count: the number of micro-batches in a batch.
        loss_scale: the number of predicted tokens in a micro-batch. Sums of gradients, divided by it and by ``count``,
            are the gradient of the mean over the batch's tokens.
    """

    def __init__(self, blocks: TokenBlocks, run: str, count: int, rows: int) -> None:
        """Set up batches. ``rows``: the rows of a micro-batch."""
        self.count = count
        self.loss_scale = loss_scale_of(rows, blocks.block_length)
        self._blocks = blocks
        self._order = SampleOrder(derived_seed(run), len(blocks))
        self._rows = rows

    def at(self, step: int, number: int) -> Content:
        """Return a micro-batch of a step. Any thread may call this method."""
        size = self.count * self._rows
        ids = self._blocks.rows(batch_of_step(self._order, step, size, number * self._rows, self._rows))
        return Content(ids, ids)


@dataclass
class Loss:
    """The loss of a micro-batch, summed over ``num_tokens`` tokens; both are 0 until the last stage has computed it."""

    loss_sum: float = 0.0
    num_tokens: int = 0

    def set(self, loss_sum: float, num_tokens: int) -> None:
        self.loss_sum, self.num_tokens = loss_sum, num_tokens


@dataclass
class Trace:
    """The trace of one micro-batch in one step."""

    content: Content
    inputs: dict[int, Tensor] = field(default_factory=dict)  # by stage, its inputs: [rows, positions, width]
    # By stage, the gradient of its output: [rows, positions, width].
    grads: dict[int, Tensor] = field(default_factory=dict)
    # By stage, the peer that has computed it forward, and has kept the graph of it if there was room.
    kept_by: dict[int, str] = field(default_factory=dict)
    loss: Loss = field(default_factory=Loss)

    @property
    def size_bytes(self) -> int:
        return sum(each.nbytes for each in (*self.inputs.values(), *self.grads.values()))


class Traces:
    """The traces of one step, up to ``max_bytes`` of tensors. Those that were kept first are dropped first."""

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
    """Return the stages to compute backward, in this order: those that lack the micro-batch, and later stages with
    unknown gradients of their inputs. ``known_grads``: the stages with a known gradient of their output.
    """
    needed: list[int] = []
    for stage in range(num_stages):
        has_grad_from = stage - 1  # the backward gives the gradient of the previous stage's output
        if stage in lacking or (has_grad_from in needed and has_grad_from not in known_grads):
            needed.append(stage)
    return needed[::-1]
