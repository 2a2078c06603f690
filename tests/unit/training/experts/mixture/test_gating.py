"""The gate's arithmetic in the precisions that a user's model may have."""

from __future__ import annotations

import pytest
import torch

from swarm_training.experts.mixture.gating import balance_loss, weights_of


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_of_any_precision_are_weighed(dtype: torch.dtype) -> None:
    chosen = torch.tensor([[1.0, 1.0, 9.0], [2.0, 5.0, 0.0]], dtype=dtype)
    answered = torch.tensor([[True, True, False], [False, True, False]])
    assert weights_of(chosen, answered).tolist() == [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]
    living = torch.tensor([True, True, False])
    cells = torch.tensor([[[0], [1], [-1]], [[-1], [0], [-1]]])
    scores = torch.zeros(2, 3, dtype=dtype)
    loss = balance_loss([scores], cells, answered, [living])
    assert loss.dtype == dtype and float(loss) == pytest.approx(1.0, rel=1e-2)
