"""Work that several tasks wait for, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from swarm_protocol.rpc.shared import SharedReading
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)


async def test_who_asks_waits_for_a_reading_that_begins_afterwards_and_those_who_ask_meanwhile_share_the_next() -> None:
    reading, ended = SharedReading(), 0
    now_s = asyncio.get_running_loop().time

    async def read() -> None:
        nonlocal ended
        await asyncio.sleep(1.0)
        ended += 1

    async def ask() -> float:
        await reading.after_now(read)
        return now_s()

    first = asyncio.ensure_future(ask())
    await asyncio.sleep(0.5)
    assert reading.is_under_way
    others = await asyncio.gather(ask(), ask(), ask())
    assert (await first, others, ended) == (1.0, [2.0] * 3, 2)
    assert not reading.is_under_way
    assert (await ask(), ended) == (3.0, 3)


async def test_a_reading_that_raises_does_not_count() -> None:
    reading, read = SharedReading(), 0

    async def fails() -> None:
        await asyncio.sleep(1.0)
        raise OSError("no answer")

    async def reads() -> None:
        nonlocal read
        read += 1

    failing = [asyncio.ensure_future(reading.after_now(fails)) for _ in range(2)]
    await asyncio.sleep(0.5)
    await reading.after_now(reads)
    assert read == 1
    for task in failing:
        with pytest.raises(OSError, match="no answer"):
            await task
