"""The batch size that fits: by memory that runs out, by what is left of it, and by time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swarm_models.out_of_memory import is_out_of_memory
from swarm_training.commands import batch_size as batch_size_module
from swarm_training.commands.batch_size import (
    BatchSizeLimits,
    Trial,
    computing,
    find_batch_size,
    free_memory_bytes,
)


def machine(memory: int = 1 << 60, seconds_each: float = 0.0, raises: Exception | None = None):
    tried: list[int] = []

    def compute(batch_size: int) -> Trial:
        tried.append(batch_size)
        if batch_size > memory:
            raise raises or torch.OutOfMemoryError("CUDA out of memory")
        return Trial(batch_size, batch_size * seconds_each, 1000 * batch_size)

    return compute, tried


@pytest.mark.parametrize(("memory", "expected"), [(1, 1), (7, 4), (8, 8), (1000, 64)])
def test_it_doubles_until_memory_runs_out(memory: int, expected: int) -> None:
    compute, tried = machine(memory)
    assert find_batch_size(compute, BatchSizeLimits(100)) == expected
    assert tried == [1 << power for power in range(len(tried))]
    assert tried[-1] == (expected if expected == 64 else 2 * expected)


def test_what_would_take_too_much_is_not_tried() -> None:
    compute, tried = machine()
    assert find_batch_size(compute, BatchSizeLimits(1 << 20, memory_bytes=8000)) == 8 and tried[-1] == 8
    compute, tried = machine(seconds_each=0.5)
    assert find_batch_size(compute, BatchSizeLimits(1 << 20, seconds=9.0)) == 16 and tried[-1] == 16
    compute, tried = machine(seconds_each=100.0)
    assert find_batch_size(compute, BatchSizeLimits(1 << 20)) == 1


def test_a_single_sample_without_room_is_said_and_other_errors_stay_themselves() -> None:
    with pytest.raises(ValueError, match="there is no memory to compute a single sample"):
        find_batch_size(machine(0)[0], BatchSizeLimits(8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_batch_size(machine(2, raises=RuntimeError("shapes cannot be multiplied"))[0], BatchSizeLimits(8))


def test_the_cpus_own_error_is_known() -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_out_of_memory(failure.value)
    compute, _ = machine(4, raises=failure.value)
    assert find_batch_size(compute, BatchSizeLimits(64)) == 4


def test_trials_leave_no_gradients_and_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    sizes: list[int] = []

    def loss_of(batch_size: int) -> torch.Tensor:
        sizes.append(batch_size)
        return model(torch.ones(batch_size, 4)).sum()

    trial = computing(model, loss_of)(3)
    assert (trial.batch_size, sizes) == (3, [3]) and trial.seconds > 0 and trial.memory_bytes >= 0
    assert all(parameter.grad is None for parameter in model.parameters())
    peaks: list[int] = [1000]  # the process has been larger before
    monkeypatch.setattr(batch_size_module, "restart_peak", lambda: peaks.append(100))
    monkeypatch.setattr(batch_size_module, "peak_resident_bytes", lambda: peaks[-1])
    compute = computing(model, lambda _: (peaks.append(170), model.weight.sum())[1])
    assert compute(1).memory_bytes == 70
    free = free_memory_bytes(torch.device("cpu"))
    assert free is None or 0 < free < 1 << 50
