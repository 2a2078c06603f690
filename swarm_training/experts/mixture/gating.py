"""The gate's arithmetic: scores of cells, weights of experts that answered, and the balance of their use."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def scores_of(cells: torch.Tensor, scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [rows, k]: the sum of each cell's scores.

    Args:
        cells: [rows, k, dimensions]; -1 is read as 0, and the caller must ignore that result.
        scores: for each dimension, [rows, size].
    """
    coordinates = cells.clamp(min=0)
    return torch.stack([own.gather(1, coordinates[:, :, level]) for level, own in enumerate(scores)]).sum(0)


def weights_of(chosen: torch.Tensor, answered: torch.Tensor) -> torch.Tensor:
    """Return [rows, k]: the softmax over the experts that have answered, so that their weights add up to 1."""
    return _softmax_of(chosen, answered) * answered


def balance_loss(
    scores: Sequence[torch.Tensor], cells: torch.Tensor, answered: torch.Tensor, living: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the balance loss of Switch Transformers (Fedus et al., 2021, equation 4), averaged over the dimensions.

    It is n · Σ f_i · p_i over the n coordinates with living experts, and 1 if all are used equally. f_i is the share of
    answers from experts at coordinate i, p_i the mean probability that this dimension's gate gives it.
    """
    losses = []
    for level, (own, alive) in enumerate(zip(scores, living, strict=True)):
        alive = alive.to(own.device)
        probabilities = _softmax_of(own, alive).mean(0)
        used = cells[:, :, level][answered]
        shares = torch.bincount(used, minlength=len(alive)).to(own.dtype) / max(1, len(used))
        losses.append(alive.sum() * (shares * probabilities).sum())
    return torch.stack(losses).mean()


def _softmax_of(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return [rows, n]: the softmax of each row over the scores that count, and 0 for the others. A row without scores
    that count has equal numbers."""
    # With minus infinity in place of the least number, such a row would be NaN.
    return scores.masked_fill(~counts, torch.finfo(scores.dtype).min).softmax(1)
