"""Distinguishes divergence from failing servers: tensors must be finite when they are sent and when they return."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from swarm_protocol.errors import RequestRejected, TrainingDiverged

ADVICE = "training has diverged; lower the learning rate"


def require_finite(tensors: Iterable[torch.Tensor], what: str, trains: bool = True) -> None:
    """Check tensors before they are sent; ``what``: their name in the plural.

    Raises:
        TrainingDiverged: some tensor has NaN or infinity. RequestRejected: the same, but nothing is being trained.
    """
    if all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        return
    reason = f"the {what} are not finite (they contain NaN or infinity)"
    raise TrainingDiverged(f"{reason}: {ADVICE}") if trains else RequestRejected(reason)
