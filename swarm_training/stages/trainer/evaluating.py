"""The loss on held-out data, which a peer of the last stage computes through all stages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import fsum, inf, isfinite

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swarm_protocol.failures import awaited_on_error
from swarm_protocol.process.routine import end_tasks
from swarm_training.core.moment import Moment
from swarm_training.data.blocks import TokenBlocks

_AT_A_TIME = 8  # micro-batches under way, so that all stages have something to compute

# Returns the loss with the weights of a moment, summed over the predicted tokens, and their number, of token ids
# [rows, positions] int64.
LossSumOf = Callable[[Moment, Tensor], Awaitable[tuple[float, int]]]


class HeldOutSamples:
    """The held-out samples of a run, which go through the stages in micro-batches."""

    def __init__(self, samples: TokenBlocks, rows: int, loss_sum_of: LossSumOf) -> None:
        """Set up. ``rows``: the samples of a micro-batch."""
        numbers = np.arange(len(samples))
        self._samples, self._loss_sum_of = samples, loss_sum_of
        self._parts = np.array_split(numbers, -(-len(samples) // rows))

    async def loss(self, moment: Moment) -> tuple[float, int]:
        """Return the mean loss over all predicted tokens, infinity if it is not finite, and the number of samples.

        Raises as the function that computes the sums of losses.
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
