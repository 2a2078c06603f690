"""When a check is made, and what is done about what it finds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from unittest.mock import patch

import pytest

from swarm_client.core.config import CHECK_SHARE, ClientConfig
from swarm_client.core.events import Reporter, WrongAnswers
from swarm_client.verification.checker import Checker
from swarm_client.verification.verdict import CheckVerdict
from swarm_protocol.errors import PeerError
from tests.unit.client.verification.test_checks import Servers, scaled
from tests.unit.support import run
from tests.worlds.virtual_time import run_virtually

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


async def checked(checker: Checker, sample, events: list, wait_s: float = 5.0) -> CheckVerdict | None:
    return await checker.check(sample, Reporter(events.append), wait_s=wait_s, then=events.append)


async def test_a_server_is_new_until_it_was_checked() -> None:
    swarm = Swarm("0:8", "0:8")
    checker, sample = Checker(swarm), swarm.sample("a")  # type: ignore[arg-type]
    assert checker.has_new(sample.hops)
    events: list = []
    assert await checked(checker, sample, events) == CheckVerdict(frozenset("a"))
    assert not checker.has_new(sample.hops) and checker.has_new(swarm.sample("b").hops)
    assert not events


async def test_who_lies_is_banned_and_reported_once() -> None:
    swarm = Swarm("0:8", "0:8", "0:8", lying={"a": scaled})
    checker = Checker(swarm)  # type: ignore[arg-type]
    await checked(checker, swarm.sample("a", lying=scaled, by="a"), events := [])
    assert swarm.banned == {"a": float("inf")}
    assert swarm.spawned == ["tell"]
    (event,) = events
    assert isinstance(event, WrongAnswers) and event.server == "a" and set(event.witnesses) == {"b", "c"}


async def test_suspects_are_left_out_for_a_while() -> None:
    swarm = Swarm("0:4", "4:8", "0:4", "4:8")
    checker = Checker(swarm)  # type: ignore[arg-type]
    await checked(checker, swarm.sample("a", "b", lying=scaled, by="a"), events := [])
    assert swarm.banned == {"a": 600.0, "b": 600.0} and not events


async def test_one_that_does_not_answer_is_left_out_and_another_is_asked() -> None:
    swarm = Swarm("0:8", "0:8", "0:4", "4:8", gone="b")
    verdict = await checked(Checker(swarm), swarm.sample("a"), [])  # type: ignore[arg-type]
    assert verdict == CheckVerdict(frozenset("a")) and swarm.failed_ids == ["b"]


def test_what_cannot_be_checked_is_said_once(caplog) -> None:
    async def scenario() -> None:
        swarm = Swarm("0:8")
        checker, sample = Checker(swarm), swarm.sample("a")  # type: ignore[arg-type]
        for _ in range(3):
            assert not (await checked(checker, sample, []) or CheckVerdict()).passed
        assert not checker.has_new(sample.hops)  # at present nobody else is there to ask

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert [record.message for record in caplog.records] == ["blocks 0:8 cannot be checked: no second server has them"]


@pytest.mark.run_by(function=run_virtually)
@pytest.mark.parametrize(("blocks", "names"), [(("0:8",), "a"), (("0:4", "4:8"), "ab")])
async def test_servers_that_nobody_can_check_are_looked_at_again_later(blocks: tuple[str, ...], names: str) -> None:
    swarm = Swarm(*blocks)
    checker, sample = Checker(swarm), swarm.sample(*names)  # type: ignore[arg-type]
    await checked(checker, sample, [])
    assert not checker.has_new(sample.hops)
    await asyncio.sleep(19.0)
    assert not checker.has_new(sample.hops)
    await asyncio.sleep(2.0)
    assert checker.has_new(sample.hops)


@pytest.mark.run_by(function=run_virtually)
async def test_servers_of_which_some_can_be_checked_are_looked_at_again_at_once() -> None:
    swarm = Swarm("0:4", "4:8", "0:4")
    checker, sample = Checker(swarm), swarm.sample("a", "b")  # type: ignore[arg-type]
    assert (await checked(checker, sample, []) or CheckVerdict()).passed == {"a"}
    assert checker.has_new(sample.hops)


async def test_a_check_that_takes_long_goes_on_beside() -> None:
    swarm = Swarm("0:8", "0:8")
    released, usable = asyncio.Event(), swarm.usable_servers

    async def late():
        await released.wait()
        return await usable()

    swarm.usable_servers = late  # type: ignore[method-assign]
    checker = Checker(swarm)  # type: ignore[arg-type]
    events: list = []
    assert await checked(checker, swarm.sample("a"), events, wait_s=0.01) is None
    checker.share = 1e9
    assert checker.is_busy and not checker.draws(checker, swarm.sample("a").hops, 1, 1, 1, is_owed=True)
    released.set()
    while not events:
        await asyncio.sleep(0)
    assert events == [CheckVerdict(frozenset("a"))] and not checker.is_busy


@pytest.mark.run_by(function=run_virtually)
async def test_servers_that_differ_are_doubted_once_an_hour_and_others_hear_of_it() -> None:
    swarm = Swarm("0:8", "0:8", lying={"b": scaled})
    checker = Checker(swarm)  # type: ignore[arg-type]
    for _ in range(3):
        await checked(checker, swarm.sample("a"), [])
    assert swarm.spawned == ["doubt"] * 2 and not swarm.banned
    await asyncio.sleep(3601.0)
    await checked(checker, swarm.sample("a"), [])
    assert swarm.spawned == ["doubt"] * 4


@pytest.mark.run_by(function=run_virtually)
async def test_a_doubt_of_others_is_over_after_four_checks_and_is_heard_once_an_hour() -> None:
    swarm = Swarm("0:8", "0:8")
    checker, sample = Checker(swarm), swarm.sample("a")  # type: ignore[arg-type]

    def is_heard() -> bool:
        with patch.object(checker._budget, "draws") as draws:
            checker.draws(checker, sample.hops, 1, 1, 100, is_owed=False)
        return draws.call_args.kwargs["is_heard"]

    await checked(checker, sample, [])
    assert not is_heard()
    for _ in range(4):
        checker.hear_doubt("a")
        assert is_heard()
        await checked(checker, sample, [])
    checker.hear_doubt("a")
    assert not is_heard()
    await asyncio.sleep(3601.0)
    checker.hear_doubt("a")
    assert is_heard() and not swarm.spawned  # it is not told again as this client's own


@pytest.mark.run_by(function=run_virtually)
async def test_doubts_of_others_neither_begin_the_record_of_a_server_nor_end_that_of_another() -> None:
    swarm = Swarm("0:8", "0:8")
    checker, sample = Checker(swarm), swarm.sample("a")  # type: ignore[arg-type]

    def share() -> float:
        with patch.object(checker._budget, "draws") as draws:
            checker.draws(checker, sample.hops, 1, 1, 100, is_owed=False)
        return draws.call_args.args[0] / checker.share

    checker.hear_doubt("a")
    await asyncio.sleep(3600.0)
    assert share() == 8  # as of any that was not checked yet
    for _ in range(8):  # in a hurry
        await checked(checker, sample, [])
    assert share() == pytest.approx(4)
    await asyncio.sleep(3600.0)
    assert share() == 1
    for number in range(5000):
        checker.hear_doubt(f"server of a stranger {number}")
    assert share() == 1


def test_by_default_a_swarm_of_others_is_checked_and_ones_own_is_not() -> None:
    swarm = Swarm("0:8")
    for config, share in ((ClientConfig(), 0.0), (ClientConfig(initial_peers=(PEER,)), CHECK_SHARE)):
        swarm.config = config
        assert Checker(swarm).share == share  # type: ignore[arg-type]
