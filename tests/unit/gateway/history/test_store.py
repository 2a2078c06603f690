"""The file with the history: what is in it after a restart, beside other processes, and after years."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_gateway.history import store
from swarm_gateway.history.opening import open_history
from swarm_gateway.history.store import (
    APPLICATION_ID,
    KEPT_S,
    MOST_EVENTS,
    WRITER_S,
    HistoryStore,
    SwarmSample,
    is_busy,
)
from swarm_gateway.history.work import Reading, Tally
from swarm_gateway.monitor.server_events import EventKind, SwarmEvent
from swarm_protocol.dht.records import WorkTotals

NOON = 1_800_000_000.0  # a multiple of 3600
EMPTY = SwarmSample(0, 0, 0, 0, 0, 0, 0)
JOINED = SwarmEvent(EventKind.JOINED, "model", "peer", "0:4", "online")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deeper" / "home.sqlite"


def tally(number: int, last: float = NOON) -> Tally:
    return Tally("model", f"p{number}", 8, WorkTotals(1, 2, 3, 4.5), Reading("f", WorkTotals(5, 6, 7, 8.5), last), NOON)


def test_samples_are_means_over_minutes_and_hours():
    """The mean of 0, 1 … n - 1 is (n - 1) / 2."""
    history = HistoryStore(None)
    for number in range(6 * 60):  # an hour
        sample = replace(EMPTY, tokens_per_s=number, blocks_missing=number % 6)
        history.add_sample(sample, NOON + 10 * number + 3)
    raw, minutes, hours = (history.samples(resolution, 0) for resolution in (10, 60, 3600))
    assert [(time, sample.tokens_per_s) for time, sample in raw] == [(NOON + 10 * n, n) for n in range(360)]
    assert [time for time, _ in minutes] == [NOON + 60 * minute for minute in range(60)]
    for minute, (_, sample) in enumerate(minutes):
        assert sample.tokens_per_s == pytest.approx(6 * minute + 5 / 2)
        assert sample.blocks_missing == 5  # the most
    ((time, hour),) = hours
    assert time == NOON and hour.tokens_per_s == pytest.approx(359 / 2)


def test_all_is_there_after_a_restart(path):
    first = HistoryStore(path)
    first.add_events([JOINED, replace(JOINED, kind=EventKind.LEFT)], NOON)
    first.add_sample(replace(EMPTY, servers=3), NOON)
    first.save_tallies([tally(1), tally(2)])
    first.save_tallies([replace(tally(2), total=WorkTotals(9, 9, 9, 9.0))])
    first.close()
    second = HistoryStore(path)
    assert [(each.id, each.time, each.event.kind) for each in second.events()] == [
        (1, NOON, "joined"),
        (2, NOON, "left"),
    ]
    assert second.events()[0].event == JOINED
    assert [sample.servers for _, sample in second.samples(60, 0)] == [3]
    assert second.tallies() == {
        ("model", "p1"): tally(1),
        ("model", "p2"): replace(tally(2), total=WorkTotals(9, 9, 9, 9.0)),
    }
    second.add_events([JOINED], NOON)
    assert second.last_event_id() == 3


def test_readers_and_the_writer_do_not_wait_for_one_another(path):
    HistoryStore(path)
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_half_minute_goes_on_after_a_restart(path):
    for number in range(6):
        history = HistoryStore(path)
        history.add_sample(replace(EMPTY, tokens_per_s=number), NOON + 10 * number)
        history.close()
    ((_, sample),) = HistoryStore(path).samples(60, 0)
    assert sample.tokens_per_s == pytest.approx(2.5)


def test_one_process_writes_at_a_time(path):
    first, second = HistoryStore(path), HistoryStore(path)
    assert first.may_write(NOON) and not second.may_write(NOON + 1)
    assert first.may_write(NOON + 20) and not second.may_write(NOON + 20 + WRITER_S - 1)
    assert second.may_write(NOON + 20 + WRITER_S + 1) and not first.may_write(NOON + 60)
    second.stop_writing()
    assert first.may_write(NOON + 60)
    first.add_events([JOINED], NOON)
    assert second.last_event_id() == 1


def test_a_clock_that_was_put_back_does_not_stop_writing(path):
    first, second = HistoryStore(path), HistoryStore(path)
    assert first.may_write(NOON + 1e6)
    assert second.may_write(NOON)


def test_it_stays_small(path, monkeypatch):
    monkeypatch.setattr(store, "MOST_EVENTS", 50)
    monkeypatch.setattr(store, "MOST_TALLIES", 5)
    history = HistoryStore(path)
    history.add_events([JOINED] * 80, NOON)
    history.save_tallies(tally(number, NOON + number) for number in range(9))
    for resolution, kept_s in KEPT_S.items():
        for age_s in (0, kept_s / 2, kept_s + 2 * resolution):
            history.add_sample(EMPTY, NOON - age_s)
    history.prune(NOON)
    assert [each.id for each in history.events()] == list(range(31, 81))
    assert sorted(peer for _, peer in history.tallies()) == ["p4", "p5", "p6", "p7", "p8"]
    for resolution, kept_s in KEPT_S.items():
        times = [time for time, _ in history.samples(resolution, 0)]
        assert min(times) >= NOON - kept_s and len(times) >= 2


def test_the_size_that_the_documentation_names(path):
    history = HistoryStore(path)
    sample = SwarmSample(100.0, 99.5, 123.456, 1234.5, 0.0123, 0.456, 1.0)
    with history._writing() as connection:
        for resolution, kept_s in KEPT_S.items():
            times = range(0, int(kept_s), resolution)
            rows = [(resolution, time, 6, *vars(sample).values()) for time in times]
            connection.executemany(f"INSERT INTO samples VALUES ({', '.join('?' * 10)})", rows)
    assert sum(len(history.samples(resolution, 0)) for resolution in KEPT_S) == 8640 + 43200 + 8760
    history._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    samples_bytes = path.stat().st_size
    assert samples_bytes < 5e6, samples_bytes
    peer_id, model = "Q" * 46, "meta-llama/Llama-3.1-70B-Instruct"
    events = [SwarmEvent(EventKind.UNREACHABLE, model, peer_id, "100:120", "unreachable", "online")] * MOST_EVENTS
    history.add_events(events, NOON)
    history._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert path.stat().st_size - samples_bytes < 15e6


# ---------------------------------------------------------------- files that cannot be used


def header(application_id: int) -> bytes:
    """Of a SQLite file, and nothing sensible behind it."""
    return (b"SQLite format 3\0" + b"\xff" * 52 + application_id.to_bytes(4, "big")).ljust(5000, b"\xff")


def test_a_damaged_history_is_put_aside(path, caplog):
    path.parent.mkdir()
    path.write_bytes(header(APPLICATION_ID))
    history = open_history(str(path), "home")
    history.add_events([JOINED], NOON)
    assert history.path == path and history.last_event_id() == 1
    (aside,) = path.parent.glob("home.sqlite.damaged-*")
    assert aside.read_bytes() == header(APPLICATION_ID)
    assert f"the history {path} is damaged" in caplog.text and f"put aside as {aside.name}" in caplog.text


@pytest.mark.parametrize("content", [b"root:x:0:0:root:/root:/bin/bash\n" * 40, b"short", header(0)])
def test_files_that_are_something_else_stay_where_they_are(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"home\.sqlite is no history: expected a new file.*--history none"):
        open_history(str(path), "home")
    assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]


def test_damaged_pages_inside_are_noticed(path):
    history = HistoryStore(path)
    history.add_events([JOINED] * 3000, NOON)
    history._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    history.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * 8192)
    assert open_history(str(path), "home").last_event_id() == 0


def test_other_databases_are_left_alone(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE photos (name TEXT)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"home\.sqlite is another database: expected a history .*--history none"):
        open_history(str(path), "home")
    assert path.read_bytes() == before


def test_a_newer_version_is_refused(path):
    history = HistoryStore(path)
    history._connection.execute("PRAGMA user_version = 2")
    history.close()
    with pytest.raises(ValueError, match="history of version 2: expected 1"):
        HistoryStore(path)


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be used for a history: unable to open database file; --history none"):
        open_history(str(tmp_path), "home")


def test_the_user_directory_is_used_if_nothing_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    history = open_history(None, "home")
    assert history.path == tmp_path / "swarm" / "history" / "home.sqlite"
    history.close()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert open_history(None, "home").path is None
    assert "cannot be used for a history" in caplog.text and "it is kept in memory" in caplog.text


def test_none_keeps_nothing():
    assert open_history("none", "home").path is None


def test_a_busy_file_is_no_damage(path, monkeypatch):
    monkeypatch.setattr(store, "_BUSY_S", 0.01)
    first, second = HistoryStore(path), HistoryStore(path)
    with first._writing(), pytest.raises(sqlite3.OperationalError) as caught:
        second.add_events([JOINED], NOON)
    assert is_busy(caught.value)
