"""A stage peer ends when it is cancelled, whatever it does at that time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch
from torch import Tensor

from swarm_training.core.config import EvaluationPolicy
from swarm_training.core.record import Progress
from swarm_training.progress.policy import LocalView
from swarm_training.stages.peer.stage_peer import OwnStage, StagePeer
from swarm_training.stages.routing.run_stages import RunStages

LIMIT_S = 5.0


@pytest.mark.parametrize("rounds", range(8))
async def test_a_peer_that_is_cancelled_just_after_an_averaging_ends(rounds: int) -> None:
    """It is cancelled so many rounds of the event loop after the averaging has ended without a result."""
    loop, own = asyncio.get_running_loop(), Progress("run/0", "peer")

    def cancel(left: int) -> None:
        if left:
            loop.call_soon(cancel, left - 1)
        else:
            running.cancel()

    async def average(vector: Tensor) -> None:
        if peer.average is average:
            peer.average = for_ever  # the next time
            cancel(rounds)

    async def for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    async def call(function: Callable[[], Any]) -> Any:
        return function()

    peer = MagicMock(own=own, is_aside=False, is_cut_off=False, is_lost=AsyncMock(return_value=False))
    peer.view.return_value, peer.average, peer.is_due = LocalView(own), average, AsyncMock(return_value=True)
    peer.table.changed_since = for_ever
    peer.stored.directory, peer.evaluator.policy = None, EvaluationPolicy()
    watch, replicas = MagicMock(tables=[]), MagicMock(run=AsyncMock())
    watch.view.return_value = RunStages(((),))
    sums = MagicMock(sums=torch.zeros(1), waiting=frozenset())
    stage = OwnStage(0, MagicMock(moment=own.moment), sums)
    running = asyncio.ensure_future(StagePeer(stage, peer, watch, replicas, "fp64", call, call).run())
    await asyncio.wait([running], timeout=LIMIT_S)
    assert running.cancelled()
