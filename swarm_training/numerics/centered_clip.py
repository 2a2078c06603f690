"""CenteredClip, a mean that a few distant vectors move only little (Karimireddy, He, Jaggi, 2021, equation 7)."""

from __future__ import annotations

from torch import Tensor

_TOLERANCE = 1e-5  # relative to tau
_MAX_ITERATIONS = 2000


def centered_clip(vectors: Tensor, weights: Tensor, tau: float, start: Tensor) -> Tensor:
    """Return the v at which Σ w_i clip(x_i − v) = 0, where clip(d) = d min(1, τ/|d|).

    It is the fixed point of v += Σ w_i clip(x_i − v) / Σ w_i. Each step here is that one, multiplied by
    Σ w_i / Σ w_i min(1, τ/|x_i − v|), which reaches the same point in fewer steps (Weiszfeld). The iteration ends when
    the original step would be shorter than 1e-5 τ. Vectors that are not finite do not count.

    Args:
        vectors: [peers, n]; weights: [peers]; start: [n], where the iteration begins.
        tau: the clipping radius, such as the median distance to ``start``; infinity gives the mean.

    Returns:
        [n], float32.

    Raises:
        ValueError: tau is not positive, a weight is negative, or no finite vector has a positive weight.
    """
    if not tau > 0:
        raise ValueError(f"tau {tau} is out of range: expected a positive number")
    counted = vectors.isfinite().all(1) & (weights > 0)
    if bool((weights < 0).any()) or not bool(counted.any()):
        raise ValueError("CenteredClip expects weights that are not negative, and a finite vector with a positive one")
    x, w = vectors[counted].double(), weights[counted].double()
    v = start.double()
    for _ in range(_MAX_ITERATIONS):
        difference = x - v
        # A vector at v itself has the distance 0, and is not clipped.
        clipped_weights = w * (tau / difference.norm(dim=1).clamp_min(1e-300)).clamp_max(1.0)
        step = clipped_weights @ difference
        v = v + step / clipped_weights.sum()
        if float(step.norm()) <= _TOLERANCE * tau * float(w.sum()):
            break
    return v.float()
