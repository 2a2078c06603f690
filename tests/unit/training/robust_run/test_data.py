"""The data of a step is fetched from other members, in virtual time."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
import torch

from swarm_protocol.errors import RequestRejected
from swarm_training.core.robust_config import RobustConfig
from swarm_training.robust.messages import Item
from swarm_training.robust.workbench import Delivery
from swarm_training.robust_run.data import StepData, to_bytes
from tests.worlds.virtual_time import at_once, run_virtually

NUM_ELEMENTS = 1000
DATA = bytes(4 * NUM_ELEMENTS)


class SlowNetwork:
    """A network in which each fetch takes the same time."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s

    async def fetch(self, _holder: str, _digest: bytes, _max_bytes: int) -> bytes:
        await asyncio.sleep(self._takes_s)
        return DATA


@pytest.mark.parametrize(("takes_s", "found"), [(23.9, DATA), (24.1, None)])
def test_a_fetch_may_take_a_phase_and_the_time_that_the_data_travels(takes_s: float, found: bytes | None) -> None:
    config = RobustConfig(phase_s=20.0, bytes_per_s=len(DATA) / 4.0)
    network: Any = SlowNetwork(takes_s)
    bench: Any = None
    step_data = StepData(bench, NUM_ELEMENTS, network, config, at_once)
    assert run_virtually(step_data.fetch_once(hashlib.sha256(DATA).digest(), "holder")) == found


def test_what_is_given_at_a_step_can_be_fetched_until_the_end_of_the_next() -> None:
    """It is checked during the next one. A part is for its owner alone."""
    part, aggregate = torch.ones(3), torch.zeros(3)
    digests = [hashlib.sha256(to_bytes(tensor)).digest() for tensor in (part, aggregate)]
    anything: Any = None
    step_data = StepData(anything, NUM_ELEMENTS, anything, RobustConfig(), at_once)

    async def scenario() -> None:
        item = Item(step=3, attempt=0, worker="anna", owner="bert")
        await step_data.give(Delivery("anna", (3, 0), "bert", parts={item: part}))
        await step_data.give(Delivery("anna", (3, 0), aggregate=aggregate))
        step_data.blobs.forget(4)
        assert await step_data.blobs.read(digests[0], "bert") == to_bytes(part)
        assert await step_data.blobs.read(digests[1], "carl") == to_bytes(aggregate)
        with pytest.raises(RequestRejected):
            await step_data.blobs.read(digests[0], "carl")
        step_data.blobs.forget(5)
        for digest in digests:
            with pytest.raises(RequestRejected):
                await step_data.blobs.read(digest, "bert")

    run_virtually(scenario())
