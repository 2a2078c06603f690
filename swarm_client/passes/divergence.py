"""Distinguishes divergence from failing servers: tensors must be finite when they are sent and when they return."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from swarm_protocol.errors import NotFinite, RequestRejected, TrainingDiverged

_ADVICE = "training has diverged; lower the learning rate"


def require_finite(tensors: Iterable[torch.Tensor], what: str, trains: bool = True) -> None:
    """Check tensors before they are sent; ``what``: their name in the plural.

    Raises:
        TrainingDiverged: some tensor has NaN or infinity. RequestRejected: the same, but nothing is being trained.
    """
    if all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        return
    reason = f"the {what} are not finite (they contain NaN or infinity)"
    raise TrainingDiverged(f"{reason}: {_ADVICE}") if trains else RequestRejected(reason)


def overflows_everywhere(first: NotFinite, second: NotFinite) -> TrainingDiverged:
    """Return the error for blocks whose second result, from another server if possible, is not finite either."""
    who = "two servers answer" if first.peer_id != second.peer_id else f"server …{first.peer_id[-6:]} answers twice"
    return TrainingDiverged(
        f"{who} values that are not finite (NaN or infinity) for blocks {second.span}, given finite ones: {_ADVICE}"
    )
