"""Requests of one expert are computed together; nobody spoils it for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from swarm_protocol.errors import PeerBusy, PeerError, RequestRejected
from swarm_training.experts.server.task_pool import Key, TaskPool

FORWARD: Key = ("forward", (0, 1))
BACKWARD: Key = ("backward", (0, 1))


class Computing:
    """Adds the tensors up; refuses batches with a 13, and breaks at a 14."""

    def __init__(self) -> None:
        self.batches: list[tuple[Key, int]] = []

    def __call__(self, key: Key, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        self.batches.append((key, len(tensors[0])))
        if bool((tensors[0] == 13).any()):
            raise RequestRejected("the gradient is not finite")
        if bool((tensors[0] == 14).any()):
            raise KeyError("a mistake of the user's module")
        return sum(tensors)


@asynccontextmanager
async def running_pool(max_batch_rows: int = 100) -> AsyncIterator[tuple[TaskPool, Computing]]:
    computing = Computing()
    pool = TaskPool(computing, window_s=0.05, max_batch_rows=max_batch_rows, max_queued_rows=20)
    running = asyncio.ensure_future(pool.run())
    try:
        yield pool, computing
    finally:
        running.cancel()
        pool.close()


def rows(value: float, count: int = 2) -> torch.Tensor:
    return torch.full((count, 3), value)


async def test_requests_that_come_together_are_one_batch_and_each_gets_its_rows() -> None:
    async with running_pool() as (pool, computing):
        results = await asyncio.gather(
            pool.submit("a", FORWARD, rows(1)),
            pool.submit("b", BACKWARD, rows(1), rows(5)),
            pool.submit("b", FORWARD, rows(2, 3)),
        )
        assert [result.tolist() for result in results] == [rows(1).tolist(), rows(6).tolist(), rows(2, 3).tolist()]
        assert computing.batches == [(FORWARD, 5), (BACKWARD, 2)]


async def test_a_request_that_is_refused_does_not_spoil_those_beside_it() -> None:
    async with running_pool() as (pool, _computing):
        good, bad, other = await asyncio.gather(
            *(pool.submit(caller, FORWARD, rows(value)) for caller, value in (("a", 1), ("b", 13), ("c", 2))),
            return_exceptions=True,
        )
        assert torch.equal(good, rows(1)) and torch.equal(other, rows(2)) and isinstance(bad, RequestRejected)


async def test_a_module_that_breaks_is_an_error_and_the_pool_goes_on() -> None:
    """No task of the batch is tried again: the module may have changed its parameters."""
    async with running_pool() as (pool, computing):
        submitted = (pool.submit(caller, FORWARD, rows(value)) for caller, value in (("a", 1), ("b", 14)))
        for error in await asyncio.gather(*submitted, return_exceptions=True):
            assert isinstance(error, PeerError) and "the expert failed: KeyError" in str(error)
        assert computing.batches == [(FORWARD, 4)]
        assert torch.equal(await pool.submit("a", FORWARD, rows(1)), rows(1))


async def test_what_does_not_fit_in_the_queue_is_refused_and_one_caller_may_have_half() -> None:
    async with running_pool() as (pool, _computing):
        waiting = [asyncio.ensure_future(pool.submit("a", FORWARD, rows(1, 6)))]
        await asyncio.sleep(0)
        with pytest.raises(PeerBusy, match="6 of 20 wait, 6 of them of this client, which may have half"):
            await pool.submit("a", FORWARD, rows(1, 5))
        waiting += [asyncio.ensure_future(pool.submit(caller, FORWARD, rows(1, 6))) for caller in "bc"]
        await asyncio.sleep(0)
        with pytest.raises(PeerBusy, match="18 of 20 wait, 0 of them"):
            await pool.submit("d", FORWARD, rows(1, 6))
        await asyncio.gather(*waiting)
        assert len(await pool.submit("a", FORWARD, rows(1, 10))) == 10


async def test_callers_that_are_gone_are_not_computed() -> None:
    async with running_pool() as (pool, computing):
        gone = asyncio.ensure_future(pool.submit("a", FORWARD, rows(1)))
        await asyncio.sleep(0)
        gone.cancel()
        await pool.submit("b", FORWARD, rows(2, 3))
        assert computing.batches == [(FORWARD, 3)]
