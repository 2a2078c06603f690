"""Each micro-batch is a request that servers take: of few enough rows, with position ids that fit into one message."""

from __future__ import annotations

import pytest
import torch

from swarm_client.passes.passes import _micro_batches
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.codec import encode_positions
from swarm_protocol.wire.constants import MAX_BATCH_SIZE


@pytest.mark.parametrize("shape", [(100_000, 1), (64, 50_000), (3, 98_304), (1, 1), (7, 5)])
def test_rows_are_cut_and_none_is_lost(shape: tuple[int, int]) -> None:
    positions = torch.arange(shape[1])[None].expand(shape)
    pieces = _micro_batches(BlockInput(torch.zeros(*shape, 1), None, positions))
    assert sum(len(piece.hidden) for piece in pieces) == shape[0]
    for piece in pieces:
        assert len(piece.hidden) <= MAX_BATCH_SIZE
        assert encode_positions(piece.position_ids) is not None
