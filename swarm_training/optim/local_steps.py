"""Local steps: what a peer's own optimizer does between two averages (Stich, 2019; DiLoCo: Douillard et al., 2023)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm_training.optim.gradients import clear_gradients, set_gradients


@dataclass(frozen=True)
class LocalSteps:
    """The settings of local steps. ``batch_size`` and the kind of optimizer must be the same for all peers of a run.

    Attributes:
        inner: an optimizer that has all trained parameters and steps without a closure. Its state stays at this peer.
        batch_size: the samples after which this peer steps; 1: it steps at each call of ``TrainingRun.step``. If all
            peers step after equally many samples, one learning rate fits all of them.
    """

    inner: torch.optim.Optimizer
    batch_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size of local steps is {self.batch_size}: expected at least 1")

    @property
    def common(self) -> dict[str, str]:
        """Return the settings that must be the same for all peers, as text."""
        return {"inner optimizer": type(self.inner).__name__, "batch_size of local steps": str(self.batch_size)}


def outer_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that moves the parameters to the mean of the peers' parameters, and no further."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD([{"params": trained}], lr=1.0)


class InnerSteps:
    """The inner optimizer, with the mean gradient of the samples since its last step."""

    def __init__(self, local: LocalSteps, parameters: Sequence[nn.Parameter], max_norm: float = 0.0) -> None:
        """Begin without gradients. ``max_norm``: the norm to which the gradient of a step is clipped; 0: it is not."""
        self._max_norm = max_norm
        self._local = local
        self._parameters = parameters
        self._means: list[Tensor | None] = [None] * len(parameters)  # float32
        self._samples = 0
        self._first_state = {each: copy.deepcopy(state) for each, state in local.inner.state.items()}

    def take(self, samples: int) -> bool:
        """Take the gradients, which are means over ``samples`` samples, and clear them. Return False if they are left
        out, because they are not finite."""
        gradients = [None if each.grad is None else each.grad.detach() for each in self._parameters]
        clear_gradients(self._parameters)
        if not all(gradient is None or bool(torch.isfinite(gradient).all()) for gradient in gradients):
            return False
        self._samples += samples
        share = samples / self._samples
        self._means = [_moved(*pair, share) for pair in zip(self._means, gradients, strict=True)]
        return True

    def step(self, is_last: bool = False) -> int:
        """Step if the batch is complete. Return the samples of the step; 0: there was none.

        ``is_last``: whether no more samples follow before the average, so that any number of them makes a step."""
        if self._samples < (1 if is_last else self._local.batch_size):
            return 0
        pairs = zip(self._parameters, self._means, strict=True)
        set_gradients(self._parameters, [None if mean is None else mean.to(own.dtype) for own, mean in pairs])
        if self._max_norm:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._local.inner.step()
        clear_gradients(self._parameters)
        samples = self._samples
        self._clear()
        return samples

    def forget(self) -> None:
        """Discard gradients, and what the optimizer remembers of the parameters: they have been replaced."""
        self._clear()
        self._local.inner.state.clear()
        for parameter, state in self._first_state.items():
            self._local.inner.state[parameter] = copy.deepcopy(state)

    def _clear(self) -> None:
        self._means = [None] * len(self._parameters)
        self._samples = 0


def _moved(mean: Tensor | None, gradient: Tensor | None, share: float) -> Tensor | None:
    """Return a running mean after the next gradient, which has this share of the samples; None stands for zeros."""
    if gradient is None:
        return None if mean is None else mean.mul_(1 - share)
    gradient = gradient.float()
    if mean is None:
        return gradient if share == 1 else gradient * share
    return mean.lerp_(gradient, share)
