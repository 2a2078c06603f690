"""What goes from one device to another goes in one copy, and comes out as if each tensor had gone alone."""

from __future__ import annotations

from unittest.mock import patch

import torch

from swarm_server.gpu import copies
from swarm_server.gpu.copies import moved
from tests.simulated_devices import FIRST, SECOND, SimulatedDevices

CPU = torch.device("cpu")


def test_each_is_where_it_belongs_and_in_its_dtype() -> None:
    shapes = [(1, 1, 8), (3, 1, 8), (1, 5, 8), (2, 1, 8), (2, 1, 8)]
    devices = [FIRST, FIRST, FIRST, SECOND, CPU]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32]
    tensors = [torch.randn(shape) for shape in shapes]
    with SimulatedDevices():
        there = moved(tensors, devices, dtypes)
        assert [tensor.device for tensor in there] == devices
        back = moved(there, [CPU] * 5, [torch.float32] * 5)
    for tensor, dtype, found in zip(tensors, dtypes, back, strict=True):
        assert found.device == CPU and torch.equal(found, tensor.to(dtype).float())


def test_rows_of_many_sessions_are_one_copy() -> None:
    with SimulatedDevices(), patch.object(copies.torch, "cat", wraps=torch.cat) as joined:
        rows = moved([torch.ones(1, 1, 8)] * 16, [FIRST] * 16, [torch.float32] * 16)
        assert joined.call_count == 1 and len({row.untyped_storage().data_ptr() for row in rows}) == 1


def test_what_stays_is_not_copied() -> None:
    tensor = torch.ones(1, 1, 8)
    assert moved([tensor, tensor], [CPU, CPU], [torch.float32] * 2)[0] is tensor
