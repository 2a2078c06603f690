"""Instructions have the operands of the operators that they stand for."""

from __future__ import annotations

import torch

from swarm_server.graph.lowering import lowered
from swarm_server.graph.recording import OperationRecorder


def test_numbers_that_lie_in_one_tensor_are_different_constants() -> None:
    recorder = OperationRecorder()
    hidden, scales = torch.zeros(2, 1, 4), torch.tensor([2.0, 3.0])
    recorder.mark(hidden)
    with recorder:
        for scale in scales:
            hidden = hidden * scale
    operands = [lowered(operation)[0].places[2] for operation in recorder.operations]
    constants = [place.memory.constant for place in operands if place is not None]
    assert [constant.item() for constant in constants if constant is not None] == [2.0, 3.0]
