"""Any peer's gradient of this step or the last one, from the batch that follows from the peer's id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swarm_training.run.state import TrainedState

Loss = Callable[[int, str], Tensor]


class PeerGradients:
    """The gradients of all peers. The last step's parameters are kept, because audits recompute its gradients."""

    def __init__(self, state: TrainedState, loss: Loss) -> None:
        """Use the parameters of ``state``. ``loss``: (step, peer id) → a scalar, from both and the parameters alone."""
        self._state = state
        self._loss = loss
        self._before: list[Tensor] | None = None

    def __call__(self, peer: str, step: int) -> Tensor:
        """Return the gradient of a peer's batch of a step, [n] float32 on the CPU.

        Raises:
            ValueError: the loss is no scalar that depends on the parameters, or the step's parameters are not kept.
        """
        with self._parameters_of(step), torch.enable_grad():
            loss = self._loss(step, peer)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError("the loss is no scalar that depends on the parameters: expected one")
            found = torch.autograd.grad(loss.reshape(()), self._state.parameters, allow_unused=True)
        pairs = zip(found, self._state.parameters, strict=True)
        parts = [torch.zeros_like(parameter) if each is None else each for each, parameter in pairs]
        return torch.cat([part.detach().reshape(-1).to("cpu", torch.float32) for part in parts])

    def remember(self) -> None:
        """Keep a copy of the parameters, which are about to change."""
        self._before = [parameter.detach().clone() for parameter in self._state.parameters]

    @contextmanager
    def _parameters_of(self, step: int) -> Iterator[None]:
        if step == self._state.step:
            yield
            return
        if step != self._state.step - 1 or self._before is None:
            raise ValueError(f"the parameters of step {step} are not kept at step {self._state.step}")
        now = [parameter.detach().clone() for parameter in self._state.parameters]
        try:
            self._set(self._before)
            yield
        finally:
            self._set(now)

    def _set(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._state.parameters, values, strict=True):
                parameter.copy_(value)
