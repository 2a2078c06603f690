"""The gradients of parameters, set and cleared outside of autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn


def set_gradients(parameters: Sequence[nn.Parameter], gradients: Iterable[Tensor | None]) -> None:
    """Give each parameter its gradient, of the parameter's shape and dtype; None clears it."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def clear_gradients(parameters: Sequence[nn.Parameter]) -> None:
    set_gradients(parameters, [None] * len(parameters))
