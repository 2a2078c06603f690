"""When a check is made, and what is done about what it finds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any
from unittest.mock import patch

import pytest

from swarm_client.core.config import CHECK_SHARE, ClientConfig
from swarm_client.core.events import Reporter, WrongAnswers
from swarm_client.verification.checker import Checker
from swarm_client.verification.verdict import CheckVerdict
from swarm_protocol.errors import PeerError
from tests.unit.client.verification.test_checks import Servers, scaled
from tests.unit.support import until
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)

PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class Swarm(Servers):
    """``failed``, ``banned``: peer ids that the checker has named."""

    def __init__(self, *blocks: str, **options) -> None:
        super().__init__(*blocks, **options)
        self.config = ClientConfig(check_share=0.5)
        self.failed_ids: list[str] = []
        self.banned: dict[str, float] = {}
        self.spawned: list[str] = []

    def failed(self, error: PeerError) -> None:
        self.failed_ids.append(error.peer_id)
        self.records = [record for record in self.records if record.peer_id != error.peer_id]

    def spawn(self, coroutine: Coroutine) -> None:
        """What the checker starts beside is not run here."""
        self.spawned.append(coroutine.__name__)
        coroutine.close()

    def ban(self, peer_id: str, duration_s: float = float("inf")) -> None:
        self.banned[peer_id] = duration_s


class Checking:
    """A swarm, its checker, and a sample of a session through some servers, of which one may lie."""

    def __init__(self, *blocks: str, through: str = "a", liar: str = "", **options: Any) -> None:
        self.swarm = Swarm(*blocks, **options)
        self.checker = Checker(self.swarm)  # type: ignore[arg-type]
        self.sample = self.swarm.sample(*through, lying=scaled, by=liar)
        self.events: list[Any] = []

    async def check(self, wait_s: float = 5.0) -> CheckVerdict | None:
        report = self.events.append
        return await self.checker.check(self.sample, Reporter(report), wait_s=wait_s, then=report)

    @property
    def has_new(self) -> bool:
        return self.checker.has_new(self.sample.hops)

    def drawn(self) -> Any:
        """What the budget is asked when a check may be due."""
        with patch.object(self.checker._budget, "draws") as draws:
            self.checker.draws(self.checker, self.sample.hops, 1, 1, 100, is_owed=False)
        return draws.call_args


async def test_a_server_is_new_until_it_was_checked() -> None:
    checking = Checking("0:8", "0:8")
    assert checking.has_new
    assert await checking.check() == CheckVerdict(frozenset("a"))
    assert not checking.has_new and checking.checker.has_new(checking.swarm.sample("b").hops)
    assert not checking.events


async def test_who_lies_is_banned_and_reported_once() -> None:
    checking = Checking("0:8", "0:8", "0:8", liar="a", lying={"a": scaled})
    await checking.check()
    assert checking.swarm.banned == {"a": float("inf")} and checking.swarm.spawned == ["tell"]
    (event,) = checking.events
    assert isinstance(event, WrongAnswers) and event.server == "a" and set(event.witnesses) == {"b", "c"}


async def test_suspects_are_left_out_for_a_while() -> None:
    checking = Checking("0:4", "4:8", "0:4", "4:8", through="ab", liar="a")
    await checking.check()
    assert checking.swarm.banned == {"a": 600.0, "b": 600.0} and not checking.events


async def test_one_that_does_not_answer_is_left_out_and_another_is_asked() -> None:
    checking = Checking("0:8", "0:8", "0:4", "4:8", gone="b")
    assert await checking.check() == CheckVerdict(frozenset("a")) and checking.swarm.failed_ids == ["b"]


async def test_what_cannot_be_checked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    checking = Checking("0:8")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not (await checking.check() or CheckVerdict()).passed
    assert not checking.has_new  # at present nobody else is there to ask
    assert [record.message for record in caplog.records] == ["blocks 0:8 cannot be checked: no second server has them"]


@pytest.mark.parametrize(("blocks", "names"), [(("0:8",), "a"), (("0:4", "4:8"), "ab")])
async def test_servers_that_nobody_can_check_are_looked_at_again_later(blocks: tuple[str, ...], names: str) -> None:
    checking = Checking(*blocks, through=names)
    await checking.check()
    assert not checking.has_new
    await asyncio.sleep(19.0)
    assert not checking.has_new
    await asyncio.sleep(2.0)
    assert checking.has_new


async def test_servers_of_which_some_can_be_checked_are_looked_at_again_at_once() -> None:
    checking = Checking("0:4", "4:8", "0:4", through="ab")
    assert (await checking.check() or CheckVerdict()).passed == {"a"}
    assert checking.has_new


async def test_a_check_that_takes_long_goes_on_beside() -> None:
    checking = Checking("0:8", "0:8")
    checker, released, usable = checking.checker, asyncio.Event(), checking.swarm.usable_servers

    async def late():
        await released.wait()
        return await usable()

    checking.swarm.usable_servers = late  # type: ignore[method-assign]
    assert await checking.check(wait_s=0.01) is None
    checker.share = 1e9
    assert checker.is_busy and not checker.draws(checker, checking.sample.hops, 1, 1, 1, is_owed=True)
    released.set()
    await until(lambda: checking.events)
    assert checking.events == [CheckVerdict(frozenset("a"))] and not checker.is_busy


async def test_servers_that_differ_are_doubted_once_an_hour_and_others_hear_of_it() -> None:
    checking = Checking("0:8", "0:8", lying={"b": scaled})
    for _ in range(3):
        await checking.check()
    assert checking.swarm.spawned == ["doubt"] * 2 and not checking.swarm.banned
    await asyncio.sleep(3601.0)
    await checking.check()
    assert checking.swarm.spawned == ["doubt"] * 4


async def test_a_doubt_of_others_is_over_after_four_checks_and_is_heard_once_an_hour() -> None:
    checking = Checking("0:8", "0:8")

    def is_heard() -> bool:
        return checking.drawn().kwargs["is_heard"]

    await checking.check()
    assert not is_heard()
    for _ in range(4):
        checking.checker.hear_doubt("a")
        assert is_heard()
        await checking.check()
    checking.checker.hear_doubt("a")
    assert not is_heard()
    await asyncio.sleep(3601.0)
    checking.checker.hear_doubt("a")
    assert is_heard() and not checking.swarm.spawned  # it is not told again as this client's own


async def test_doubts_of_others_neither_begin_the_record_of_a_server_nor_end_that_of_another() -> None:
    checking = Checking("0:8", "0:8")

    def share() -> float:
        return checking.drawn().args[0] / checking.checker.share

    checking.checker.hear_doubt("a")
    await asyncio.sleep(3600.0)
    assert share() == 8  # as of any that was not checked yet
    for _ in range(8):  # in a hurry
        await checking.check()
    assert share() == pytest.approx(4)
    await asyncio.sleep(3600.0)
    assert share() == 1
    for number in range(5000):
        checking.checker.hear_doubt(f"server of a stranger {number}")
    assert share() == 1


def test_by_default_a_swarm_of_others_is_checked_and_ones_own_is_not() -> None:
    swarm = Swarm("0:8")
    for config, share in ((ClientConfig(), 0.0), (ClientConfig(initial_peers=(PEER,)), CHECK_SHARE)):
        swarm.config = config
        assert Checker(swarm).share == share  # type: ignore[arg-type]
