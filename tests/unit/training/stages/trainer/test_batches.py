"""Micro-batches of a table: each a function of its number, all of them the batch, no row twice in an epoch."""

from __future__ import annotations

import numpy as np
import torch

from swarm_training.data.blocks import TokenBlocks
from swarm_training.data.order import SampleOrder, batch_of_step, derived_seed
from swarm_training.stages.trainer.micro_batches import BlockMicroBatches

BLOCKS = TokenBlocks(np.arange(60 * 5, dtype=np.int32), 5)


def test_micro_batches_are_the_batch_of_a_step_cut_up() -> None:
    data = BlockMicroBatches(BLOCKS, "run", count=4, rows=3)
    for step in (0, 3, 7):
        rows = torch.cat([data.at(step, number).ids for number in range(4)])
        order = SampleOrder(derived_seed("run"), 60)
        assert torch.equal(rows, BLOCKS.rows(batch_of_step(order, step, 12, 0, 12)))
    assert torch.equal(data.at(2, 1).ids, BlockMicroBatches(BLOCKS, "run", 4, 3).at(2, 1).labels)
    assert data.loss_scale == 3 * 4


def test_no_row_comes_twice_in_an_epoch_and_runs_differ() -> None:
    data = BlockMicroBatches(BLOCKS, "run", count=4, rows=3)
    firsts = [int(row[0]) for step in range(5) for number in range(4) for row in data.at(step, number).ids]
    assert sorted(firsts) == list(range(0, 300, 5))
    assert not torch.equal(data.at(0, 0).ids, BlockMicroBatches(BLOCKS, "other", 4, 3).at(0, 0).ids)
