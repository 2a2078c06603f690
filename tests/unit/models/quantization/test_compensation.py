"""Rounding to 4 bits in which the inputs' second moments decide."""

from __future__ import annotations

import pytest
import torch

from swarm_models.kernels.int4_linear import PlainInt4Weight, quantize_groups
from swarm_models.quantization import compensation
from swarm_models.quantization.compensation import InputMoments, quantize_compensated


@pytest.mark.parametrize("part", [64, 4096])
def test_outputs_for_correlated_inputs_change_less_than_by_rounding_to_the_nearest(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compensation, "PART", part)
    random = torch.Generator().manual_seed(0)
    mixed = torch.randn(96, 96, generator=random) * torch.logspace(0, -1.5, 96)
    known, new = (torch.randn(400, 96, generator=random) @ mixed for _ in range(2))
    weight = torch.randn(24, 96, generator=random)
    moments = InputMoments(96)
    moments.add(known.view(4, 100, 96))
    exact = known.double().T @ known.double()
    for index, found in enumerate(moments.parts):
        inputs = slice(index * part, index * part + len(found))
        torch.testing.assert_close(found.double(), exact[inputs, inputs], rtol=1e-4, atol=1e-2)

    def error(q: torch.Tensor, groups: torch.Tensor) -> float:
        wrong = PlainInt4Weight(q, groups).dequantize() - weight
        return float((new @ wrong.T).norm() / (new @ weight.T).norm())

    nearest, compensated = error(*quantize_groups(weight)), error(*quantize_compensated(weight, moments))
    assert compensated < (0.8 if part == 64 else 0.7) * nearest


def test_inputs_that_are_never_used_leave_the_weight_rounded_to_the_nearest() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q, groups = quantize_compensated(weight, InputMoments(64))
    wrong = PlainInt4Weight(q, groups).dequantize() - weight
    assert wrong.norm() < 0.1 * weight.norm()
