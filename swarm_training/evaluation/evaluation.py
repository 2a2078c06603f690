"""``Evaluation``, with which a run computes the loss on held-out data while it trains on."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from math import fsum, inf, isfinite

import torch
from torch import Tensor, nn

from swarm_training.core.callbacks import InThread
from swarm_training.core.config import EvaluationPolicy
from swarm_training.core.record import HeldOutLoss

# Of a model in evaluation mode: for each batch of the held-out data, the mean loss and the number of samples.
Losses = Callable[[nn.Module], Iterable[tuple[Tensor | float, int]]]


class Stopped(Exception):
    """The computing of a loss was stopped before its end."""


class Evaluation:
    """The evaluation of a run on held-out data, every so many global steps.

    One peer of the run computes the loss, with the parameters of exactly that step, in a thread of its own: training
    goes on meanwhile. Up to three peers hold these parameters in CPU memory until the loss is known.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Losses,
        *,
        every: int,
        patience: int = 0,
        least_improvement: float = 0.0,
        earlier: Sequence[HeldOutLoss] = (),
    ) -> None:
        """Prepare to evaluate ``model``, which has the parameters that the run trains.

        Args:
            losses: called with a copy of the model, in evaluation mode and without gradients. It yields the mean loss
                over each batch of the held-out data, and the number of its samples. All peers should have equal data.
            every: the number of global steps between two evaluations.
            patience: the number of evaluations in a row without an improvement after which the run ends; 0: it goes on.
            least_improvement: the least by which a loss must be below the lowest one before, to be an improvement.
            earlier: the losses that were known at this peer's checkpoint, from which the run goes on if this peer
                founds it, or if the others take this checkpoint.

        Raises:
            ValueError: a number is out of its range.
        """
        if every < 1:
            raise ValueError(f"every is {every}: expected at least 1 step")
        self.policy = EvaluationPolicy(every, patience, least_improvement)
        self.earlier = tuple(earlier)
        self._given = model
        self._losses = losses
        self._model: nn.Module | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []  # of the given model and of its copy
        self._trained: list[nn.Parameter] = []  # of the copy, in the order of the run; empty between two evaluations
        self._computing = threading.Lock()

    def go_on_after(self, losses: Sequence[HeldOutLoss]) -> None:
        """Go on from a checkpoint at which these losses were known, instead of from what the constructor was given.

        Call this before the run begins.
        """
        assert self._model is None, "the run has begun"
        self.earlier = tuple(losses)

    def bind(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the model, without the memory of these parameters, which the run trains. The copy shares all others.
        Raise ValueError if the model does not have these parameters."""
        trained, own = list(parameters), {id(parameter) for parameter in self._given.parameters()}
        if not all(id(parameter) in own for parameter in trained):
            raise ValueError("the run trains parameters that are not in the model of its evaluation: expected the same")
        memo: dict[int, object] = {id(parameter): parameter for parameter in self._given.parameters()}
        self._trained = [nn.Parameter(each.detach().new_empty(0), requires_grad=False) for each in trained]
        memo |= {id(each): empty for each, empty in zip(trained, self._trained, strict=True)}
        self._model = copy.deepcopy(self._given, memo).eval()  # what is in ``memo`` takes the place of copies
        self._buffers = list(zip(self._given.buffers(), self._model.buffers(), strict=True))

    def snapshot(self, parameters: Iterable[Tensor]) -> Snapshot:
        """Copy the values of the parameters, in the order of ``bind``, to CPU memory. Call it between two steps."""
        values = [each.detach().to("cpu", copy=True) for each in parameters]
        return Snapshot(self, values, [given.detach().to("cpu", copy=True) for given, _ in self._buffers])

    @torch.no_grad()
    def loss_with(self, snapshot: Snapshot) -> tuple[float, int]:
        """Return the mean loss with the parameters of a snapshot, and the number of samples. Raise Stopped, and what
        the caller's function raises."""
        assert self._model is not None, "bind was not called"
        parts: list[float] = []
        samples = 0
        with self._computing:
            try:
                for empty, value in zip(self._trained, snapshot.values, strict=True):
                    empty.data = value.to(empty.device)
                for (_, own), value in zip(self._buffers, snapshot.buffers, strict=True):
                    own.copy_(value)
                for loss, count in self._losses(self._model):
                    parts.append(float(loss) * count)
                    samples += count
                    if snapshot.is_stopped:
                        raise Stopped
            finally:  # the memory is free until the next evaluation
                for empty in self._trained:
                    empty.data = empty.new_empty(0)
        if not samples:
            raise ValueError("there are no held-out samples: expected at least one")
        return (fsum(parts) / samples if all(map(isfinite, parts)) else inf), samples


class Snapshot:
    """The parameters and buffers of one step, with which the loss can be computed in any thread."""

    def __init__(self, evaluation: Evaluation, values: list[Tensor], buffers: list[Tensor]) -> None:
        self.values = values
        self.buffers = buffers
        self._evaluation = evaluation
        self._stopping = threading.Event()

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """End the computing of the loss after the present batch."""
        self._stopping.set()

    async def computed(self, in_thread: InThread) -> tuple[float, int]:
        """Return what ``loss`` does in a thread; end it if this call is cancelled."""
        try:
            found: tuple[float, int] = await in_thread(self.loss)
            return found
        except asyncio.CancelledError:
            self.stop()
            raise

    def loss(self) -> tuple[float, int]:
        """Return what ``Evaluation.loss_with`` does."""
        return self._evaluation.loss_with(self)
