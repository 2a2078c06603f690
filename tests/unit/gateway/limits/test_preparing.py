"""Long requests are prepared one after the other, and never keep short ones waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarm_gateway.limits.admission import ApiError, GatewayLimits, LocalAdmission, QueueName, QueuePlace
from swarm_gateway.limits.preparing import Preparations, beside_streams
from tests.unit.support import until

LONG, SHORT = 2**21, 100


class Work:
    """Of one request. ``begun``: its thread is at work, until ``goes_on`` is set."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.begun.set()
        assert self.goes_on.wait(60.0)
        return 7


async def test_long_requests_take_turns_and_short_ones_do_not_wait() -> None:
    preparations, first, second = Preparations(LocalAdmission()), Work(), Work()
    one, two = (asyncio.ensure_future(preparations.run("key", LONG, work)) for work in (first, second))
    await until(first.begun.is_set)
    for _ in range(20):
        assert await preparations.run("key", SHORT, lambda: "short") == "short"
    assert not second.begun.is_set()
    first.goes_on.set()
    second.goes_on.set()
    assert await asyncio.gather(one, two) == [7, 7]


async def test_whose_client_leaves_keeps_its_turn_while_its_thread_works_and_costs_nothing_before() -> None:
    preparations, works = Preparations(LocalAdmission()), [Work() for _ in range(3)]
    first, second, third = (asyncio.ensure_future(preparations.run("key", LONG, work)) for work in works)
    await until(works[0].begun.is_set)
    first.cancel()
    second.cancel()
    await asyncio.wait([first, second])
    for _ in range(20):
        assert await preparations.run("key", SHORT, lambda: "short") == "short"
    assert not works[2].begun.is_set()
    works[2].goes_on.set()
    works[0].goes_on.set()
    assert await third == 7 and not works[1].begun.is_set()


async def test_errors_are_raised_and_end_a_turn() -> None:
    preparations = Preparations(LocalAdmission())
    for size in (LONG, SHORT, LONG):
        with pytest.raises(ValueError, match="invalid literal"):
            await preparations.run("key", size, lambda: int("no number"))


async def test_long_requests_of_one_key_do_not_hold_up_those_of_another() -> None:
    order: list[str] = []
    preparations, first = Preparations(LocalAdmission(is_shared=True)), Work()
    tasks = [asyncio.ensure_future(preparations.run("many", LONG, first))]
    await until(first.begun.is_set)
    for name in ("many", "many", "many", "few"):
        tasks.append(asyncio.ensure_future(preparations.run(name, LONG, lambda name=name: order.append(name))))
        await asyncio.sleep(0)
    first.goes_on.set()
    await asyncio.gather(*tasks)
    assert order == ["many", "few", "many", "many"]


async def test_more_long_requests_than_may_wait_are_refused() -> None:
    preparations, first = Preparations(LocalAdmission(GatewayLimits(max_active=1, max_queued=0))), Work()
    one = asyncio.ensure_future(preparations.run("key", LONG, first))
    await until(first.begun.is_set)
    two = asyncio.ensure_future(preparations.run("key", LONG, lambda: 8))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="too many long prompts") as refused:
        await preparations.run("key", LONG, lambda: 9)
    assert refused.value.status == 429
    first.goes_on.set()
    assert await asyncio.gather(one, two) == [7, 8]


async def test_a_gateway_that_is_ending_does_not_say_that_prompts_wait() -> None:
    class EndingAdmission(LocalAdmission):
        async def join(self, key: str, count: int, queue: QueueName = "generations") -> list[QueuePlace]:
            raise ApiError(503, "this gateway is ending", code="ending")

    with pytest.raises(ApiError, match="is ending") as refused:
        await Preparations(EndingAdmission()).run("key", LONG, lambda: 9)
    assert refused.value.status == 503


async def test_long_bodies_are_read_beside_the_streams_of_the_event_loop() -> None:
    assert await beside_streams(SHORT, threading.get_ident) == threading.get_ident()
    assert await beside_streams(LONG, threading.get_ident) != threading.get_ident()
