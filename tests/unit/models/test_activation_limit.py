"""What autograd saves is counted while a limit is active, once per memory, and nothing is saved above the limit."""

from __future__ import annotations

import pytest
import torch

from swarm_models.activation_limit import ActivationLimit, count_saved

_SIZE_BYTES = 4 * 1000  # of ``ones``
_LARGE = 1 << 20


def ones() -> torch.Tensor:
    return torch.ones(1000, requires_grad=True)


def test_memory_is_counted_once_and_weights_are_not() -> None:
    inputs, weight = ones(), ones()
    with ActivationLimit(_LARGE, {weight.untyped_storage().data_ptr()}, set()) as limit:
        output = (inputs * weight).sum() + (inputs * weight).sum()  # each product saves both factors
    assert _SIZE_BYTES < limit.size_bytes < 2 * _SIZE_BYTES + 4 * 1024 and not limit.exceeded
    output.backward()
    assert torch.equal(inputs.grad, torch.full((1000,), 2.0))  # type: ignore[arg-type]


def test_what_is_saved_after_the_context_is_not_counted() -> None:
    with ActivationLimit(_LARGE, set(), set()) as limit:
        pass
    ones() * ones()
    count_saved(ones())
    assert limit.size_bytes == 0


def test_nothing_is_saved_above_the_limit() -> None:
    with ActivationLimit(_SIZE_BYTES, set(), set()) as limit:
        output = ones() * ones()
        count_saved(ones())
    assert limit.exceeded
    with pytest.raises(AssertionError, match="was not kept"):
        output.sum().backward()
