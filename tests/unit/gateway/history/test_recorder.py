"""A recorder over swarms that are what a test says."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_gateway.history import recorder as recorders
from swarm_gateway.history.recorder import HistoryRecorder, sample_of
from swarm_gateway.history.store import HistoryStore
from swarm_protocol.dht.records import ServerState, WorkTotals
from swarm_protocol.errors import NoSwarm
from tests.monitored_swarm import FakeMonitor, server
from tests.unit.support import until


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch) -> None:
    for name in ("_LOOK_S", "_RARELY_S"):
        monkeypatch.setattr(recorders, name, 0.01)


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def kinds(recorder: HistoryRecorder) -> list[str]:
    return [str(stored.event.kind) for stored in recorder.events(-1)]


async def started(monitor: FakeMonitor, history: HistoryStore, *clock: Clock) -> HistoryRecorder:
    """A recorder that has looked once."""
    recorder = HistoryRecorder(monitor, history, *clock)
    await recorder.start()
    await until(lambda: recorder.latest.time)
    return recorder


@asynccontextmanager
async def recording(
    monitor: FakeMonitor, history: HistoryStore | None = None, *clock: Clock
) -> AsyncIterator[HistoryRecorder]:
    recorder = await started(monitor, history or HistoryStore(None), *clock)
    yield recorder
    await recorder.close()


async def event(number: int, *recorders: HistoryRecorder) -> None:
    """Wait until this is the last event that they know."""
    await until(lambda: all(recorder.latest.last_event_id == number for recorder in recorders))


async def test_events_as_they_happen():
    monitor = FakeMonitor(server("a", "0:20"), server("b", "0:10"))
    async with recording(monitor) as recorder:
        looks: list[None] = []
        stop = recorder.listen(lambda: looks.append(None))
        await until(lambda: len(looks) > 2)
        assert kinds(recorder) == []  # who was there before has not joined
        monitor.put(server("c", "10:20", state=ServerState.JOINING))
        await event(1, recorder)
        monitor.change("a", answers=False)
        await event(3, recorder)
        monitor.remove("b")
        await event(5, recorder)
        assert kinds(recorder) == ["joined", "unreachable", "blocks_lost", "left", "blocks_lost"]
        stop()


async def test_looking_waits_for_the_first_look_and_says_why_there_is_none():
    monitor = FakeMonitor()
    monitor.trouble = "nobody answers"
    recorder = HistoryRecorder(monitor, HistoryStore(None))
    waiting = asyncio.ensure_future(recorder.look())
    await asyncio.sleep(0)
    assert not waiting.done()
    await recorder.start()
    with pytest.raises(NoSwarm, match="nobody answers"):
        await waiting
    monitor.trouble = ""
    monitor.put(server("a", "0:20"))
    await until(lambda: recorder.latest.snapshot is not None)
    assert [status.model for status in (await recorder.look()).models] == ["some-model"]
    assert recorder.latest.trouble == ""
    monitor.trouble = "gone again"
    await until(lambda: recorder.latest.trouble)
    assert (await recorder.look()).models  # what was seen last
    await recorder.close()


async def test_samples_every_ten_seconds_and_tallies_survive_a_restart(tmp_path: Path):
    clock, path = Clock(), tmp_path / "home.sqlite"
    monitor = FakeMonitor(server("a", "0:20", work=WorkTotals(2000, 0, 0, 100.0)))
    recorder = HistoryRecorder(monitor, HistoryStore(path), clock)
    await recorder.start()
    for number in range(1, 4):
        await until(lambda: recorder.latest.time == clock.now)
        clock.now += 10.0
        monitor.change("a", work=WorkTotals(2000 + 400 * number, 0, 0, 100.0 + 10 * number))
        await until(lambda: recorder.latest.time == clock.now)
    rates = [sample.tokens_per_s for _, sample in recorder.samples(10, 0)]
    assert rates == [0.0, *[400 / 10 / 20] * 3]
    await recorder.close()
    again = HistoryRecorder(monitor, HistoryStore(path), clock)
    assert again.latest.tallies["some-model", "a"].tokens == 3200 / 20
    monitor.change("a", tls_fingerprint=b"new", work=WorkTotals(100, 0, 0, 5.0))
    clock.now += 30.0
    await again.start()
    await until(lambda: again.latest.time == clock.now)
    assert again.latest.tallies["some-model", "a"].tokens == 3300 / 20
    await again.close()


async def test_two_gateways_at_one_file_write_each_event_once(tmp_path: Path):
    monitor, path = FakeMonitor(server("a", "0:20"), server("b", "0:20")), tmp_path / "home.sqlite"
    first = await started(monitor, HistoryStore(path))
    async with recording(monitor, HistoryStore(path)) as second:
        monitor.change("b", answers=False)
        await event(1, first, second)
        monitor.change("b", answers=True)
        await event(2, first, second)
        assert kinds(first) == kinds(second) == ["unreachable", "back"]
        await first.close()
        monitor.remove("b")  # the second writes now
        await event(3, second)


class LateMonitor(FakeMonitor):
    """Looks a second time only once ``goes_on`` is set."""

    def __init__(self, *servers: object) -> None:
        super().__init__(*servers)
        self.goes_on = asyncio.Event()

    async def look_again(self, wait_s: float):
        await self.goes_on.wait()
        return await super().look_again(wait_s)


async def test_who_goes_on_writing_does_not_write_again_what_the_other_has(tmp_path: Path):
    early, late = (kind(server("a", "0:20"), server("b", "0:20")) for kind in (FakeMonitor, LateMonitor))
    path = tmp_path / "home.sqlite"
    first = await started(early, HistoryStore(path))
    async with recording(late, HistoryStore(path)) as second:
        early.change("b", answers=False)
        await event(1, first)
        await first.close()
        late.change("b", answers=False)
        late.goes_on.set()
        await event(1, second)
        late.remove("b")
        await event(2, second)
        assert kinds(second) == ["unreachable", "left"]


class FailingHistory(HistoryStore):
    """``errors``: what these methods raise, by their names."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.errors: dict[str, sqlite3.OperationalError] = {}

    def add_sample(self, *args: object) -> None:
        if "add_sample" in self.errors:
            raise self.errors["add_sample"]
        super().add_sample(*args)

    def add_events(self, *args: object) -> None:
        if "add_events" in self.errors:
            raise self.errors["add_events"]
        super().add_events(*args)


@pytest.mark.parametrize("methods", [("add_events", "add_sample"), ("add_sample",)])
async def test_what_happens_while_the_file_is_busy_is_written_once(tmp_path: Path, methods: tuple[str, ...]):
    clock, monitor = Clock(), FakeMonitor(server("a", "0:20"), server("b", "0:20"))
    history, locked = FailingHistory(tmp_path / "home.sqlite"), sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
    async with recording(monitor, history, clock) as recorder:
        history.errors = dict.fromkeys(methods, locked)
        for answers in (False, True, False):
            monitor.change("b", answers=answers)
            clock.now += 10.0
            await until(lambda: recorder.latest.time == clock.now)
        history.errors = {}
        await event(3, recorder)
        monitor.remove("b")
        await event(4, recorder)
    kept = [str(stored.event.kind) for stored in HistoryStore(tmp_path / "home.sqlite").events()]
    assert kept == ["unreachable", "back", "unreachable", "left"]


async def test_a_full_disk_is_said_once_and_events_go_on(tmp_path: Path, caplog):
    monitor, history = FakeMonitor(server("a", "0:20"), server("b", "0:20")), FailingHistory(tmp_path / "home.sqlite")
    async with recording(monitor, history) as recorder:
        monitor.change("b", answers=False)
        await event(1, recorder)
        history.errors = {"add_events": sqlite3.OperationalError("database or disk is full")}
        monitor.change("b", answers=True)
        await event(2, recorder)  # numbers go on
        monitor.remove("b")
        await event(3, recorder)
        assert kinds(recorder) == ["back", "left"]
    assert caplog.text.count("cannot be written (database or disk is full): from now on it is kept in memory") == 1


async def test_a_mistake_in_one_look_does_not_end_looking(caplog):
    monitor = FakeMonitor(server("a", "0:20"))
    async with recording(monitor) as recorder:
        good, monitor.servers = monitor.servers, None
        await until(lambda: "a look at the swarm failed" in caplog.text)
        monitor.servers = good
        seen = recorder.latest.time
        await until(lambda: recorder.latest.time > seen)


async def test_what_a_sample_has():
    monitor = FakeMonitor(
        server("a", "0:10", cache_tokens=100, cache_tokens_left=25, queue_delay_s=0.02),
        server("b", "10:15", cache_tokens=100, cache_tokens_left=100, queue_delay_s=0.04),
        server("c", "15:20", state=ServerState.JOINING),
        server("d", "0:20", answers=False),
    )
    async with recording(monitor) as recorder:
        sample = sample_of(recorder.latest)
        assert (sample.servers, sample.servers_online, sample.blocks_missing) == (4, 2, 5)
        assert sample.queue_delay_s == pytest.approx(0.03)
        assert sample.kv_used == pytest.approx(75 * 10 / (100 * 15))  # by blocks
        assert sample_of(replace(recorder.latest, snapshot=None)).servers == 0
