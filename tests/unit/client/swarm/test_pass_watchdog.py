"""When a pass without a session is given up, in virtual time: by size, by what was seen, and never an honest one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from swarm_client.core.config import ClientConfig, Timeouts
from swarm_client.routing.routing import Hop
from swarm_client.swarm.pass_watchdog import BACKWARD, PassWatchdog
from swarm_client.swarm.watchdog import Stalled
from swarm_protocol.errors import BadReply
from swarm_protocol.span import Span
from tests.unit.support import server_record
from tests.worlds.virtual_time import run_virtually

TOKENS_PER_S = 100.0
FOR_EVER_S = 1e6


class Client:
    """Sends passes to servers that take as long as the test says."""

    def __init__(self, step_timeout_s: float = FOR_EVER_S) -> None:
        self.watchdog = PassWatchdog(ClientConfig(step_timeout_s=step_timeout_s, timeouts=Timeouts(stall_s=5.0)))

    async def send(
        self,
        job: Awaitable[Any],
        num_positions: int = 10,
        times: float = 1.0,
        *,
        name: str = "ada",
        size_bytes: int = 0,
        alarms: int = 0,
        can_replace: Callable[[], bool] = lambda: True,
        **fields: Any,
    ) -> float:
        """How long the pass took, or until it was given up."""
        hop = Hop(server_record(name, "0:4", forward_tokens_per_s=TOKENS_PER_S, **fields), Span(0, 4))

        async def work() -> None:
            await job

        start_s = asyncio.get_running_loop().time()
        await self.watchdog.watch(work(), hop, num_positions, size_bytes, times, alarms, can_replace)
        return asyncio.get_running_loop().time() - start_s

    async def given_up_after(self, *args: Any, **options: Any) -> float:
        start_s = asyncio.get_running_loop().time()
        with pytest.raises(Stalled, match="did not finish a pass within"):
            await self.send(asyncio.sleep(FOR_EVER_S), *args, **options)
        return asyncio.get_running_loop().time() - start_s


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def leaving_nothing() -> None:
        await coroutine
        await asyncio.sleep(1.0)  # what is cancelled ends
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(leaving_nothing())


pytestmark = pytest.mark.run_by(function=run)


@pytest.mark.parametrize(
    ("options", "expected_s"),
    [
        ({"num_positions": 10}, 5.0),
        ({"num_positions": 1000}, 100.0),
        ({"num_positions": 1000, "times": BACKWARD}, 300.0),
        ({"num_positions": 1000, "queue_delay_s": 2.0}, 120.0),
        ({"num_positions": 1000, "queue_delay_s": 1e9}, 130.0),  # a server's word is not taken for that
        ({"num_positions": 10, "size_bytes": 250_000}, 7.0),  # on a line of 1 Mbit/s
        ({"num_positions": 10, "alarms": 2}, 20.0),
        ({"num_positions": 10, "alarms": 100}, 80.0),
    ],
)
async def test_a_pass_that_never_comes_back(options: dict[str, Any], expected_s: float) -> None:
    assert await Client().given_up_after(**options) == pytest.approx(expected_s)
    assert await Client(50.0).given_up_after(**options) == pytest.approx(min(50.0, expected_s))


async def test_the_only_server_is_waited_for_and_others_that_come_are_taken() -> None:
    client = Client()
    assert await client.send(asyncio.sleep(77.0), can_replace=lambda: False) == pytest.approx(77.0)
    loop = asyncio.get_running_loop()
    come_s = loop.time() + 500.0
    waited_s = await Client().given_up_after(can_replace=lambda: loop.time() >= come_s)
    assert 500.0 <= waited_s <= 501.0


@pytest.mark.parametrize("slower", [1.0, 9.0])
async def test_many_passes_that_wait_in_one_queue(slower: float) -> None:
    """Each alone would be late before it is its turn. The server is slower than it says, by less than allowed."""
    client, turn = Client(), asyncio.Lock()

    async def in_turn(num_positions: int, times: float) -> None:
        async with turn:
            await asyncio.sleep(slower * times * num_positions / TOKENS_PER_S)

    for times in (1.0, BACKWARD):
        passes = [client.send(in_turn(1000, times), 1000, times) for _ in range(16)]
        waits_s = await asyncio.gather(*passes)
        assert max(waits_s) == pytest.approx(16 * slower * times * 10)


async def test_a_server_that_stalls_in_the_middle_of_many_passes() -> None:
    """What the first ones took is known; the others are given up together."""
    client, loop = Client(), asyncio.get_running_loop()
    answers = [client.send(asyncio.sleep(10.0 * number), 1000) for number in (1, 2)]
    lost = [client.given_up_after(1000) for _ in range(3)]
    *_, first, second, third = await asyncio.gather(*answers, *lost)
    assert first == second == third == pytest.approx(20.0 + 3 * 100.0)
    assert loop.time() == pytest.approx(first)


async def test_who_was_slow_may_be_as_slow_again() -> None:
    """Ten times slower than announced would be late; it has been seen to be, and to come back."""
    client = Client()
    await client.send(asyncio.sleep(80.0), 1000)
    assert await client.send(asyncio.sleep(700.0), 1000) == pytest.approx(700.0)
    assert await client.given_up_after(1000, name="bob") == pytest.approx(100.0)  # which says nothing of others


async def test_passes_that_share_a_slow_line() -> None:
    """16 MB at 1 Mbit/s: all come at once, after two minutes, from servers that need little time."""
    client = Client()
    passes = [
        client.send(asyncio.sleep(16 * 1e6 / 125e3), 64, name=f"server {number % 4}", size_bytes=1_000_000)
        for number in range(16)
    ]
    assert max(await asyncio.gather(*passes)) == pytest.approx(128.0)


async def test_what_a_pass_raises_is_raised() -> None:
    client = Client()

    async def refuse() -> None:
        raise BadReply("no")

    with pytest.raises(BadReply, match="no"):
        await client.send(refuse())
    assert await client.given_up_after() == pytest.approx(5.0)  # nothing is learned, nothing is left
