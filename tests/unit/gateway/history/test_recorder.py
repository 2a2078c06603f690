"""A recorder over swarms that are what a test says."""

from __future__ import annotations

import asyncio
import sqlite3
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


async def test_events_as_they_happen():
    monitor = FakeMonitor(server("a", "0:20"), server("b", "0:10"))
    recorder = HistoryRecorder(monitor, HistoryStore(None))
    await recorder.start()
    looks = 0

    def looked() -> None:
        nonlocal looks
        looks += 1

    stop = recorder.listen(looked)
    await until(lambda: looks > 2)
    assert kinds(recorder) == []  # who was there before has not joined
    monitor.put(server("c", "10:20", state=ServerState.JOINING))
    await until(lambda: recorder.latest.last_event_id == 1)
    monitor.change("a", answers=False)
    await until(lambda: recorder.latest.last_event_id == 3)
    monitor.remove("b")
    await until(lambda: recorder.latest.last_event_id == 5)
    assert kinds(recorder) == ["joined", "unreachable", "blocks_lost", "left", "blocks_lost"]
    stop()
    await recorder.close()


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
    monitor = FakeMonitor(server("a", "0:20"), server("b", "0:20"))
    first, second = (HistoryRecorder(monitor, HistoryStore(tmp_path / "home.sqlite")) for _ in range(2))
    for each in (first, second):
        await each.start()
        await until(lambda: each.latest.time)  # noqa: B023
    monitor.change("b", answers=False)
    await until(lambda: first.latest.last_event_id and second.latest.last_event_id)
    monitor.change("b", answers=True)
    await until(lambda: first.latest.last_event_id == second.latest.last_event_id == 2)
    assert kinds(first) == kinds(second) == ["unreachable", "back"]
    await first.close()
    monitor.remove("b")  # the second writes now
    await until(lambda: second.latest.last_event_id == 3)
    await second.close()


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
    first, second = (HistoryRecorder(monitor, HistoryStore(tmp_path / "home.sqlite")) for monitor in (early, late))
    for each in (first, second):
        await each.start()
        await until(lambda: each.latest.time)  # noqa: B023
    early.change("b", answers=False)
    await until(lambda: first.latest.last_event_id == 1)
    await first.close()
    late.change("b", answers=False)
    late.goes_on.set()
    await until(lambda: second.latest.last_event_id)
    late.remove("b")
    await until(lambda: second.latest.last_event_id == 2)
    assert kinds(second) == ["unreachable", "left"]
    await second.close()


def locked() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


class BusyHistory(HistoryStore):
    is_busy = False

    def add_sample(self, *args: object) -> None:
        if self.is_busy:
            raise locked()
        super().add_sample(*args)

    def add_events(self, *args: object) -> None:
        if self.is_busy == "at once":
            raise locked()
        super().add_events(*args)


@pytest.mark.parametrize("busy", ["at once", "after the events"])
async def test_what_happens_while_the_file_is_busy_is_written_once(tmp_path: Path, busy: str):
    clock, monitor = Clock(), FakeMonitor(server("a", "0:20"), server("b", "0:20"))
    history = BusyHistory(tmp_path / "home.sqlite")
    recorder = HistoryRecorder(monitor, history, clock)
    await recorder.start()
    await until(lambda: recorder.latest.time == clock.now)
    history.is_busy = busy
    monitor.change("b", answers=False)
    clock.now += 10.0
    await until(lambda: recorder.latest.time == clock.now)
    for answers in (True, False):
        monitor.change("b", answers=answers)
        clock.now += 10.0
        await until(lambda: recorder.latest.time == clock.now)
    history.is_busy = False
    await until(lambda: recorder.latest.last_event_id == 3)
    monitor.remove("b")
    await until(lambda: recorder.latest.last_event_id == 4)
    await recorder.close()
    kept = [str(stored.event.kind) for stored in HistoryStore(tmp_path / "home.sqlite").events()]
    assert kept == ["unreachable", "back", "unreachable", "left"]


class FullDisk(HistoryStore):
    is_full = False

    def add_events(self, *args: object) -> None:
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        super().add_events(*args)


async def test_a_full_disk_is_said_once_and_events_go_on(tmp_path: Path, caplog):
    monitor = FakeMonitor(server("a", "0:20"), server("b", "0:20"))
    history = FullDisk(tmp_path / "home.sqlite")
    recorder = HistoryRecorder(monitor, history)
    await recorder.start()
    await until(lambda: recorder.latest.time)
    monitor.change("b", answers=False)
    await until(lambda: recorder.latest.last_event_id == 1)
    history.is_full = True
    monitor.change("b", answers=True)
    await until(lambda: recorder.latest.last_event_id == 2)  # numbers go on
    monitor.remove("b")
    await until(lambda: recorder.latest.last_event_id == 3)
    assert kinds(recorder) == ["back", "left"]
    await recorder.close()
    assert caplog.text.count("cannot be written (database or disk is full): from now on it is kept in memory") == 1


async def test_a_mistake_in_one_look_does_not_end_looking(caplog):
    monitor = FakeMonitor(server("a", "0:20"))
    recorder = HistoryRecorder(monitor, HistoryStore(None))
    await recorder.start()
    await until(lambda: recorder.latest.time)
    good, monitor.servers = monitor.servers, None
    await until(lambda: "a look at the swarm failed" in caplog.text)
    monitor.servers = good
    seen = recorder.latest.time
    await until(lambda: recorder.latest.time > seen)
    await recorder.close()


async def test_what_a_sample_has():
    monitor = FakeMonitor(
        server("a", "0:10", cache_tokens=100, cache_tokens_left=25, queue_delay_s=0.02),
        server("b", "10:15", cache_tokens=100, cache_tokens_left=100, queue_delay_s=0.04),
        server("c", "15:20", state=ServerState.JOINING),
        server("d", "0:20", answers=False),
    )
    recorder = HistoryRecorder(monitor, HistoryStore(None))
    await recorder.start()
    await until(lambda: recorder.latest.time)
    sample = sample_of(recorder.latest)
    assert (sample.servers, sample.servers_online, sample.blocks_missing) == (4, 2, 5)
    assert sample.queue_delay_s == pytest.approx(0.03)
    assert sample.kv_used == pytest.approx(75 * 10 / (100 * 15))  # by blocks
    unreached = replace(recorder.latest, snapshot=None)
    assert sample_of(unreached).servers == 0
    await recorder.close()
