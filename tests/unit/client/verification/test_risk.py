"""How often servers are checked, beside closed formulas; and what that finds and costs, with servers that compute."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from swarm_client.adapters.snapshots import NOTHING
from swarm_client.core.config import CHECK_SHARE, ClientConfig
from swarm_client.core.events import Reporter
from swarm_client.verification.checker import Checker
from swarm_client.verification.risk import CheckBudget, CheckHistory, check_cost, price_of, share_of, work_of
from swarm_client.verification.session_checks import SessionChecks
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput
from tests.unit.client.verification.test_checker import Swarm
from tests.unit.client.verification.test_checks import HIDDEN, true, zeros
from tests.unit.support import server_record
from tests.worlds.virtual_time import run_virtually

OLD = 1e6  # seconds


@pytest.mark.parametrize(
    ("history", "times"),
    [
        (CheckHistory(), 8.0),
        (CheckHistory(passed=100), 4.0),  # within a moment
        (CheckHistory(passed=1, age_s=OLD), 4.0),
        (CheckHistory(passed=7, age_s=OLD), 1.0),
        (CheckHistory(passed=10_000, age_s=OLD), 1.0),
        (CheckHistory(passed=7, age_s=OLD, is_coarse=True), 2.0),
        (CheckHistory(passed=10_000, age_s=OLD, is_coarse=True), 1.0),
        (CheckHistory(passed=10_000, age_s=OLD, is_doubted=True), 8.0),
    ],
)
def test_the_share_falls_with_age_and_checks_and_never_below_the_steady_one(
    history: CheckHistory, times: float
) -> None:
    assert share_of(history, 0.02) == pytest.approx(0.02 * times)


def test_a_position_in_a_prompt_costs_what_most_servers_say() -> None:
    said = [server_record("a", forward_tokens_per_s=speed) for speed in (80.0, 100.0, 1e8)]  # beside 10 steps
    assert price_of(said) == pytest.approx(0.1)
    assert price_of([server_record("a", forward_tokens_per_s=1.0)]) == price_of([server_record("a")]) == 1.0
    assert work_of(3, 1, 0.1) == 3.0 and work_of(2, 50, 0.1) == pytest.approx(10.0)
    assert check_cost(100, 0.1) == pytest.approx(11.0) and check_cost(2, 0.1) == pytest.approx(1.1)


@pytest.mark.parametrize("cost", [1.1, 20.0, 500.0])
@pytest.mark.parametrize("owed_after", [0, 5, 10_000])
def test_no_more_is_spent_than_the_share(cost: float, owed_after: int) -> None:
    """Texts of 100 steps, whose first check has its turn after some of them."""
    budget, spent, num_texts = CheckBudget(random.Random(0).random), 0.0, 400
    for _ in range(num_texts):
        is_checked = False
        for step in range(100):
            if budget.draws(0.03, 1.0, cost, not is_checked and step >= owed_after):
                spent, is_checked = spent + cost, True
    work = 100.0 * num_texts
    assert spent / work == pytest.approx(0.03, abs=5 * (0.03 * cost / work) ** 0.5 + 64 / work)


@pytest.mark.parametrize("cost", [1.1, 20.0])
@pytest.mark.parametrize("num_doubted", [1, 2, 3])
def test_doubts_of_others_move_checks_and_buy_none(cost: float, num_doubted: int) -> None:
    """Three servers compute texts of 100 steps in turn. Some are always doubted, by whoever likes to.

    No more is spent than the share of the work, and a server that is not doubted keeps nine tenths of its checks.
    """
    budget, spent, num_texts, share = CheckBudget(random.Random(2).random), [0.0] * 3, 1200, 0.03
    for number in range(num_texts):
        is_checked = False
        for step in range(100):
            is_owed = not is_checked and step >= 5
            if budget.draws(share, 1.0, cost, is_owed, is_heard=number % 3 < num_doubted):
                spent[number % 3], is_checked = spent[number % 3] + cost, True
    work = 100.0 * num_texts
    noise = 5 * (share * cost / work) ** 0.5
    assert sum(spent) / work == pytest.approx(share, abs=noise + 64 / work)
    assert min(spent) / (work / 3) >= 0.9 * share - 2 * noise


@pytest.mark.parametrize("cost", [1.1, 20.0])
def test_whom_others_begin_to_doubt_is_checked_soon(cost: float) -> None:
    """A geometric distribution: with what was kept, one step in 64, as long as that lasts, and others beside."""
    share, waits, num_seeds = 0.03, [], 60
    for seed in range(num_seeds):
        budget, wait = CheckBudget(random.Random(seed).random), 1
        for step in range(8_000):  # texts of 100 steps, with their checks
            budget.draws(share, 1.0, cost, step % 100 >= 5)
        while not budget.draws(share, 1.0, cost, False, is_heard=True):
            wait += 1
        waits.append(wait)
    expected = 1 / (min(16.0 / cost, 1.0) / 64 + 0.25 * share / cost)
    assert sum(waits) / num_seeds == pytest.approx(expected, abs=5 * expected / num_seeds**0.5)


def test_a_liar_that_was_checked_in_this_text_is_found_after_as_many_steps_as_the_formula_says() -> None:
    """Where all texts have their check, the whole share is spent at random: a geometric distribution."""
    share, cost, waits = 0.03, 2.0, []
    budget = CheckBudget(random.Random(1).random)
    for _ in range(4000):  # nothing more can be saved
        budget.draws(share, 1.0, cost, False)
    for _ in range(2000):
        wait = 1
        while not budget.draws(share, 1.0, cost, False):
            wait += 1
        waits.append(wait)
    expected = cost / share
    assert sum(waits) / 2000 == pytest.approx(expected, abs=5 * expected / 2000**0.5)


class World:
    """One client and three servers of the same blocks, which compute a prompt ``1 / price`` times as fast as steps."""

    def __init__(self, price: float, seed: int) -> None:
        self.chance = random.Random(seed)
        self.swarm = Swarm("0:8", "0:8", "0:8")
        self.swarm.records = [replace(each, forward_tokens_per_s=10.0 / price) for each in self.swarm.records]
        self.swarm.config = ClientConfig(check_share=CHECK_SHARE)
        self.swarm.is_banned = self.swarm.banned.__contains__  # type: ignore[attr-defined]
        self.swarm.lying = {"a": lambda hidden: zeros(hidden) if self.chance.random() < self.lying else hidden}
        self.checker = Checker(self.swarm, self.chance)  # type: ignore[arg-type]
        self.lying = 0.0  # share of steps, and of further questions, in which the first server lies
        self.num_lies = self.num_texts = self.num_checked_texts = 0
        self.price, self.work, self.again = price, 0.0, 0.0

    async def text(self, num_prompt: int, num_new: int) -> None:
        reporter = Reporter()
        checks = SessionChecks(self.swarm, reporter)  # type: ignore[arg-type]
        checks._checker = self.checker
        length, hop = num_prompt + num_new, self.swarm.hop("a")
        hidden = torch.randn(1, length, HIDDEN)
        outputs = true(hop.span, hidden)
        for end in (num_prompt, *range(num_prompt + 1, length + 1)):
            num_tokens = num_prompt if end == num_prompt else 1
            self.work += work_of(1, num_tokens, self.price)
            is_lie = self.chance.random() < self.lying
            self.num_lies += is_lie
            new = outputs[:, max(0, end - min(num_tokens, 8)) : end]
            await self.step(checks, hidden[:, :end], zeros(new) if is_lie else new, num_tokens, end)
            if self.swarm.banned:
                return
        await self.finish()
        self.num_texts, self.num_checked_texts = (
            self.num_texts + 1,
            self.num_checked_texts + (reporter.stats.checks > 0),
        )

    async def step(self, checks: SessionChecks, hidden: torch.Tensor, new: torch.Tensor, num: int, end: int) -> None:
        hop, inputs, before = self.swarm.hop("a"), BlockInput(hidden), len(self.swarm.asked)
        await checks.accept((hop,), (pb.RAW, pb.RAW), lambda _row: inputs, new, num, end, NOTHING, None)
        await self.finish()  # a second server is quick here
        self.again += (len(self.swarm.asked) - before) * max(1.0, end * self.price)

    async def finish(self) -> None:
        await asyncio.sleep(0.02)
        while self.checker.is_busy:
            await asyncio.sleep(0.01)


@pytest.mark.run_by(function=run_virtually)
async def test_each_text_is_checked_and_honest_servers_pay_no_more_than_three_hundredths() -> None:
    """On servers that compute prompts as fast as GPUs do. The texts in which they were new do not count."""
    world = World(price=0.013, seed=3)
    for _ in range(10):
        await world.text(24, 60)
    world.work = world.again = 0.0
    for _ in range(40):
        await world.text(24, 60)
    assert world.num_checked_texts == world.num_texts == 50
    assert 0.01 < world.again / world.work <= 0.03
    assert not world.swarm.banned


@pytest.mark.parametrize("num_good", [0, 8])
@pytest.mark.parametrize(("price", "most"), [(0.013, 15), (0.13, 60)])
def test_who_lies_in_a_tenth_of_its_steps_is_found_within_few_lies(price: float, most: int, num_good: int) -> None:
    """Also after texts without lies, which have earned it a good record."""

    async def story(seed: int) -> World:
        world = World(price, seed)
        for _ in range(num_good):
            await world.text(24, 60)
        world.lying = 0.1
        while not world.swarm.banned:
            await world.text(24, 60)
        return world

    worlds = [run_virtually(story(seed)) for seed in range(2)]
    assert all(set(world.swarm.banned) == {"a"} and world.num_lies <= most for world in worlds)
