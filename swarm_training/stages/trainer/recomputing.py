"""A peer of the last stage computes through all stages whether a micro-batch is finite, and losses on held-out data."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from math import fsum, inf, isfinite, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_protocol.errors import PeerMoved, TrainingDiverged
from swarm_protocol.failures import awaited_on_error
from swarm_protocol.process.routine import end_tasks
from swarm_training.core.moment import Moment
from swarm_training.data.blocks import TokenBlocks
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.routing.coverage import Claims
from swarm_training.stages.routing.router import Router
from swarm_training.stages.routing.speed import FORWARD, SHARES
from swarm_training.stages.rpc.client import StagesClient
from swarm_training.stages.rpc.hosting import HostedStage
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.micro_batches import Content, Trace
from swarm_training.stages.trainer.passes import Passes
from swarm_training.stages.trainer.peer_caller import Look, PeerCaller, StepOver

_AT_A_TIME = 8  # micro-batches under way, so that all stages have something to compute

# Returns the loss with the weights of a moment, summed over the predicted tokens, and their number, of token ids
# [rows, positions] int64.
LossSumOf = Callable[[Moment, Tensor], Awaitable[tuple[float, int]]]


class Recomputing:
    """A recomputation of micro-batches through all stages, as by a trainer. The last stage is computed here, and no
    gradient counts.

    It begins with token ids. Hidden states or gradients would prove nothing, since those of a stranger could make any
    model overflow.
    """

    def __init__(
        self, run: str, host: HostedStage, look: Look, network: GrpcNetwork, config: TrainerConfig, loss_scale: float
    ) -> None:
        """Compute by the stage of ``host``. ``look``: returns each stage's living peers. ``config``, ``loss_scale``: as
        trainers have them."""
        self._host, self._look, self._config, self._loss_scale = host, look, config, loss_scale
        self._client = StagesClient(network, run, config.forms)
        router = Router(random.random, config.backoff)
        self._asking = PeerCaller(look, router, config, self._client)

    async def is_finite(self, moment: Moment, number: int, ids: Tensor, labels: Tensor) -> bool:
        """Return whether all answers are finite. ids, labels: [rows, positions] int64. Raise PeerMoved if a stage has
        no peer at this moment, or this peer has gone on; RequestRejected if the token ids do not fit the model."""
        stages, trace = len(self._look()), Trace(Content(ids, labels))
        passes = self._passes(moment, forward_only=False)
        try:
            inputs = await passes.inputs(stages - 1, number, trace)
            if not await self._own_is_finite(moment, inputs, trace):
                return False
            await passes.compute_backward(range(stages - 1), number, trace)
        except TrainingDiverged:
            return False
        except StepOver:
            raise PeerMoved(f"some stage has nobody at step {moment.step} any more") from None
        return True

    async def held_out_loss(self, moment: Moment, ids: Tensor) -> tuple[float, int]:
        """Return the loss with the weights of all stages at a moment, summed over the predicted tokens, and their
        number. The sum is infinity if anything is not finite. Stages that have not come to the moment are waited for,
        since none goes on from there without this peer. ids: [rows, positions] int64.

        Raises:
            PeerMoved: this peer has gone on, or back.
            RequestRejected: the token ids do not fit the model.
        """
        passes, trace = self._passes(moment, forward_only=True), Trace(Content(ids, ids))
        while (inputs := await self._inputs_there(passes, trace)) is None:
            self._require(moment)
            await asyncio.sleep(self._config.poll_s)
        if not bool(torch.isfinite(inputs).all()):
            return inf, ids.numel()

        def compute() -> tuple[float, int]:
            self._require(moment)
            found = self._host.stage.forward(inputs, ids, keeps=False)
            return float(found.loss_sum if found.loss_sum is not None else inf), found.num_tokens or 0

        return await self._host.peer.compute(compute, SHARES[FORWARD])

    async def _inputs_there(self, passes: Passes, trace: Trace) -> Tensor | None:
        """Return the inputs of the own stage, NaN if they are not finite; None if some stage is at another moment."""
        try:
            return await passes.inputs(passes.num_stages - 1, 0, trace)
        except TrainingDiverged:
            return torch.tensor(nan)
        except StepOver:
            return None

    def _require(self, moment: Moment) -> None:
        """Raise PeerMoved if this peer has other weights than those of the moment."""
        if self._host.moment != moment:
            raise PeerMoved(f"this peer is at step {self._host.moment.step}")

    def _passes(self, moment: Moment, forward_only: bool) -> Passes:
        claims, num_stages = Claims(self._config.settle_s), len(self._look())
        return Passes(
            moment, num_stages, self._loss_scale, self._asking, self._client, claims, forward_only=forward_only
        )

    async def _own_is_finite(self, moment: Moment, inputs: Tensor, trace: Trace) -> bool:
        """Compute the last stage here, and put the gradient of its inputs into the trace."""

        def compute() -> bool:
            self._require(moment)
            found = self._host.stage.backward(inputs, trace.content.labels, loss_scale=self._loss_scale)
            is_finite = isfinite(found.loss_sum or 0.0)
            if found.inputs is not None:
                trace.grads[self._host.stage.index - 1] = found.inputs
                is_finite &= bool(torch.isfinite(found.inputs).all())
            return is_finite

        return await self._host.peer.compute(compute, 1.0)


class HeldOutSamples:
    """The held-out samples of a run, which go through the stages in micro-batches."""

    def __init__(self, samples: TokenBlocks, rows: int, loss_sum_of: LossSumOf) -> None:
        """Divide the samples into micro-batches of at most ``rows``."""
        numbers = np.arange(len(samples))
        self._samples, self._loss_sum_of = samples, loss_sum_of
        self._parts = np.array_split(numbers, -(-len(samples) // rows))

    async def loss(self, moment: Moment) -> tuple[float, int]:
        """Return the mean loss over all predicted tokens, infinity if it is not finite, and the number of samples.

        Raises as ``loss_sum_of``.
        """
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def part(numbers: NDArray[np.int64]) -> tuple[float, int]:
            async with limit:
                ids = await asyncio.to_thread(self._samples.rows, numbers)
                return await self._loss_sum_of(moment, ids)

        parts = [asyncio.ensure_future(part(numbers)) for numbers in self._parts]
        async with awaited_on_error(lambda: end_tasks(parts)):
            found = await asyncio.gather(*parts)
        losses, num_tokens = [loss for loss, _ in found], sum(number for _, number in found)
        return (fsum(losses) / num_tokens if all(map(isfinite, losses)) else inf), len(self._samples)
