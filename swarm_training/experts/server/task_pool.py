"""The task pool: it batches requests of one expert, and computes the batches one by one in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch

from swarm_protocol.errors import PeerBusy, PeerError, SwarmError
from swarm_protocol.failures import any_error_as
from swarm_protocol.net.shares import HalfShares
from swarm_training.experts.core.cells import Cell
from swarm_training.experts.search.batching import BatchQueue

Key = tuple[Literal["forward", "backward"], Cell]
Compute = Callable[[Key, Sequence[torch.Tensor]], torch.Tensor]
T = TypeVar("T")
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Task:
    tensors: tuple[torch.Tensor, ...]  # each [rows, hidden]
    result: asyncio.Future[torch.Tensor]

    @property
    def rows(self) -> int:
        return len(self.tensors[0])

    def succeed(self, result: torch.Tensor) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def fail(self, error: SwarmError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class TaskPool:
    """The task pool of one server, used on one event loop; ``compute`` runs in the only thread that uses experts."""

    def __init__(self, compute: Compute, window_s: float, max_batch_rows: int, max_queued_rows: int) -> None:
        """Create the pool; ``compute`` receives the tensors of several requests, concatenated along the rows."""
        self._compute = compute
        self._queue: BatchQueue[Key, _Task] = BatchQueue(window_s, max_batch_rows)
        self._rows = HalfShares(max_queued_rows)  # that wait or are computed
        self._filled = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "experts")

    async def submit(self, caller: str, key: Key, *tensors: torch.Tensor) -> torch.Tensor:
        """Compute these tensors, each [rows, hidden], in a batch, and return the result for them.

        Raises:
            PeerBusy: too many rows wait, in all or of this caller.
            SwarmError: the errors of ``compute``.
        """
        rows = len(tensors[0])
        if not self._rows.fits(caller, rows):
            raise PeerBusy(
                f"no room for {rows} rows more: {self._rows.used} of {self._rows.capacity} wait, "
                f"{self._rows.held(caller)} of them of this client, which may have half"
            )
        loop = asyncio.get_running_loop()
        task = _Task(tensors, loop.create_future())
        self._rows.add(caller, rows)
        self._queue.add(key, task, rows, loop.time())
        self._filled.set()
        try:
            return await task.result
        finally:
            self._rows.add(caller, -rows)

    async def run(self) -> None:
        """Compute batches until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            self._filled.clear()
            due_in_s = self._queue.due_in_s(clock())
            if due_in_s is None or due_in_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(due_in_s):
                        await self._filled.wait()
                continue
            key, tasks = self._queue.take()
            await self._answer(key, [task for task in tasks if not task.result.done()])  # the other callers have gone

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a function in the compute thread, while no expert computes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _answer(self, key: Key, tasks: list[_Task]) -> None:
        if not tasks:
            return
        tensors = [torch.cat(each) for each in zip(*(task.tensors for task in tasks), strict=True)]
        try:
            with any_error_as(partial(_failure, key)):
                whole = await self.in_thread(lambda: self._compute(key, tensors))
                results = whole.split([task.rows for task in tasks])
        except SwarmError as error:
            if len(tasks) > 1 and not isinstance(error, _ModuleFailed):  # one bad request must not fail the others
                for task in tasks:
                    await self._answer(key, [task])
            else:
                for task in tasks:
                    task.fail(error)
            return
        for task, result in zip(tasks, results, strict=True):
            task.succeed(result)


class _ModuleFailed(PeerError):
    """The error that a user's module has failed. It is not tried again, because it may have changed its parameters."""


def _failure(key: Key, error: Exception) -> SwarmError:
    """Return the error for callers: a user's module may raise any."""
    if isinstance(error, SwarmError):
        return error
    _logger.error("%s of expert %s failed", *key, exc_info=error)
    return _ModuleFailed(f"the expert failed: {type(error).__name__}")
