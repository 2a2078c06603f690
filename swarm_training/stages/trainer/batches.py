"""The content of micro-batches: it follows from run, step and number alone, so that any trainer can replay it."""

from __future__ import annotations

from dataclasses import dataclass

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
