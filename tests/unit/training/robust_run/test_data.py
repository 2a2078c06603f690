"""The data of a step is fetched from other members, in virtual time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from swarm_training.core.robust_config import RobustConfig
from swarm_training.robust_run.data import StepData
from tests.unit.virtual_time import run_virtually

NUM_ELEMENTS = 1000
DATA = bytes(4 * NUM_ELEMENTS)


class SlowNetwork:
    """A network in which each fetch takes the same time."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s

    async def fetch(self, _holder: str, _digest: bytes, _max_bytes: int) -> bytes:
        await asyncio.sleep(self._takes_s)
        return DATA


async def at_once(function: Callable[[], Any]) -> Any:
    return function()


@pytest.mark.parametrize(("takes_s", "found"), [(23.9, DATA), (24.1, None)])
def test_a_fetch_may_take_a_phase_and_the_time_that_the_data_travels(takes_s: float, found: bytes | None) -> None:
    config = RobustConfig(phase_s=20.0, bytes_per_s=len(DATA) / 4.0)
    network: Any = SlowNetwork(takes_s)
    bench: Any = None
    step_data = StepData(bench, NUM_ELEMENTS, network, config, at_once)
    assert run_virtually(step_data.fetch_once(hashlib.sha256(DATA).digest(), "holder")) == found
