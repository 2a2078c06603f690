"""A run of one peer, in plain torch: as ``TrainingRun`` is driven, without a network."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from swarm_training.core.record import Progress
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.ledger.orders import ModeratorOrder


class LocalRun:
    """Averages the shares by their samples, and steps when the target batch is there.

    Attributes:
        stop_after: sets ``stopping`` at this global step.
        ends_at: ends at this global step, as if the loss on held-out data had stopped falling.
        goes_back: from a global step to another, once.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        target_batch_size: int,
        stop_after: int | None = None,
        goes_back: tuple[int, int] | None = None,
        max_norm: float = 0.0,
        ends_at: int | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._target = target_batch_size
        self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._samples = 0
        self._stop_after = stop_after
        self._goes_back = goes_back
        self._ends_at = ends_at
        self.max_norm = max_norm
        self.stopping = threading.Event()
        self.num_steps = self.num_rollbacks = self.went_back_to = 0
        self.initial_peers = ["/ip4/127.0.0.1/tcp/1/p2p/QmSelf"]
        self.evaluations = EvaluationHistory()
        self.reason_of_end = ""
        self.is_finished = False
        self.shares: list[int] = []
        self.rates: list[float] = []
        self.is_closed = False
        self.last_loss: float | None = None
        self.records: list[Progress] = []
        self.bans: dict[str, ModeratorOrder] = {}
        self._losses = 0.0

    def step(self, samples: int, loss: float | None = None) -> None:
        assert not self.is_closed and not self.reason_of_end
        self.shares.append(samples)
        self._samples += samples
        self._losses += samples * (loss or 0.0)
        for total, parameter in zip(self._sums, self._parameters, strict=True):
            total += samples * parameter.grad
            parameter.grad = None
        if self._samples >= self._target:
            for total, parameter in zip(self._sums, self._parameters, strict=True):
                parameter.grad = total / self._samples
            if self.max_norm:
                nn.utils.clip_grad_norm_(self._parameters, self.max_norm)
            self._optimizer.step()
            self.rates.append(self._optimizer.param_groups[0]["lr"])
            self._optimizer.zero_grad()
            self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]
            self.last_loss = self._losses / self._samples
            self._samples = self._losses = 0
            self.num_steps += 1
            if self._goes_back is not None and self.num_steps == self._goes_back[0]:
                self.num_rollbacks, self.num_steps, self._goes_back = 1, self._goes_back[1], None
                self.went_back_to = self.num_steps
            if self.num_steps == self._ends_at:
                self.reason_of_end = "it falls no more"
            if self.num_steps == self._stop_after:
                self.stopping.set()

    def shared_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        self.is_finished = True

    def close(self) -> None:
        self.is_closed = True
