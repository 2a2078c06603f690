"""The history of one swarm in a SQLite file: events, samples at three resolutions, and the work of servers.

Each sample is added to the means of all resolutions at once, so that nothing is downsampled later. A full file has
about 4 MB of samples and 14 MB of events.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from swarm_gateway.history.work import Key, Reading, Tally
from swarm_gateway.monitor.server_events import EventKind, SwarmEvent
from swarm_protocol.dht.records import WorkTotals
from swarm_protocol.failures import undone_on_error

SCHEMA_VERSION = 1
APPLICATION_ID = 0x53574D31  # marks a file as a history, in its header
KEPT_S = {10: 86400.0, 60: 30 * 86400.0, 3600: 365 * 86400.0}  # how long samples are kept, by their resolution in s
MOST_EVENTS = 100_000
MOST_TALLIES = 10_000
WRITER_S = 30.0  # another process may write after the writer has been silent for this long
_BUSY_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True)
class SwarmSample:
    """A sample of the swarm at one moment, or its mean over some time.

    Attributes:
        tokens_per_s, prompt_tokens_per_s: positions through whole models, in decoding and in prompts.
        queue_delay_s: the mean over the servers that are online.
        kv_used: the used share of the servers' KV room, 0 to 1.
        blocks_missing: the missing blocks of all models; for a mean, the largest number.
    """

    servers: float
    servers_online: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    queue_delay_s: float
    kv_used: float
    blocks_missing: float


@dataclass(frozen=True)
class StoredEvent:
    """An event in the history. ``time``: the time at which it was seen, in seconds since 1970."""

    id: int
    time: float
    event: SwarmEvent


_VALUES = [field.name for field in fields(SwarmSample)]
_SCHEMA = f"""
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL,
    peer_id TEXT NOT NULL, blocks TEXT NOT NULL, state TEXT NOT NULL, before TEXT NOT NULL
);
CREATE TABLE samples (
    resolution INTEGER NOT NULL, time INTEGER NOT NULL, count INTEGER NOT NULL,
    {", ".join(f"{name} REAL NOT NULL" for name in _VALUES)},
    PRIMARY KEY (resolution, time)
) WITHOUT ROWID;
CREATE TABLE tallies (
    model TEXT NOT NULL, peer_id TEXT NOT NULL, num_blocks INTEGER NOT NULL,
    decoded INTEGER NOT NULL, prompts INTEGER NOT NULL, passes INTEGER NOT NULL, uptime_s REAL NOT NULL,
    process TEXT NOT NULL, last_decoded INTEGER NOT NULL, last_prompts INTEGER NOT NULL, last_passes INTEGER NOT NULL,
    last_uptime_s REAL NOT NULL, last_time REAL NOT NULL, since REAL NOT NULL,
    PRIMARY KEY (model, peer_id)
) WITHOUT ROWID;
CREATE TABLE writer (one INTEGER PRIMARY KEY CHECK (one = 1), owner TEXT NOT NULL, until REAL NOT NULL);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
_UPSERT_SAMPLE = f"""
INSERT INTO samples VALUES ({", ".join("?" * (3 + len(_VALUES)))}) ON CONFLICT DO UPDATE SET
    {", ".join(f"{n} = ({n} * count + excluded.{n}) / (count + 1)" for n in _VALUES if n != "blocks_missing")},
    blocks_missing = max(blocks_missing, excluded.blocks_missing), count = count + 1
"""


class HistoryStore:
    """The history of one swarm, for any thread. Several processes may share a file; one at a time writes.

    All methods raise sqlite3.Error if the file cannot be read or written now.
    """

    def __init__(self, path: Path | None, last_event_id: int = 0) -> None:
        """Open the file; ``path`` None keeps all in memory. ``last_event_id``: the last id of the history to continue.

        Raises:
            ValueError: the file is no history of this version.
            sqlite3.Error, OSError: the file is damaged, or cannot be used.
        """
        self.path = path
        self._owner = uuid.uuid4().hex
        self._lock = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        where = ":memory:" if path is None else str(path)
        self._connection = sqlite3.connect(where, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        with undone_on_error(self._connection.close):  # nobody else could close it
            self._prepare(last_event_id)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def may_write(self, time: float) -> bool:
        """Return whether this process is the writer for the next ``WRITER_S`` seconds."""
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO writer VALUES (1, ?, ?) ON CONFLICT DO UPDATE SET owner = excluded.owner, "
                "until = excluded.until WHERE owner = excluded.owner OR until < ? OR until > ?",
                (self._owner, time + WRITER_S, time, time + 2 * WRITER_S),  # the clock may have been set back
            )
            return bool(connection.execute("SELECT owner = ? FROM writer", (self._owner,)).fetchone()[0])

    def stop_writing(self) -> None:
        """Let another process write at once."""
        with self._writing() as connection:
            connection.execute("DELETE FROM writer WHERE owner = ?", (self._owner,))

    def add_events(self, events: Sequence[SwarmEvent], time: float) -> None:
        rows = [(time, str(e.kind), e.model, e.peer_id, e.blocks, e.state, e.before) for e in events]
        with self._writing() as connection:
            connection.executemany(
                "INSERT INTO events (time, kind, model, peer_id, blocks, state, before) VALUES (?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

    def events(self, after: int = 0, most: int = 1000) -> list[StoredEvent]:
        """Return the newest events with ids above ``after``, at most ``most``, oldest first."""
        rows = self._read(
            "SELECT id, time, kind, model, peer_id, blocks, state, before FROM events WHERE id > ? "
            "ORDER BY id DESC LIMIT ?",
            (after, most),
        )
        return [StoredEvent(id, time, SwarmEvent(EventKind(kind), *rest)) for id, time, kind, *rest in reversed(rows)]

    def last_event_id(self) -> int:
        return int(self._read("SELECT coalesce(max(id), 0) FROM events")[0][0])

    def add_sample(self, sample: SwarmSample, time: float) -> None:
        rows = [(resolution, int(time // resolution) * resolution, 1, *astuple(sample)) for resolution in KEPT_S]
        with self._writing() as connection:
            connection.executemany(_UPSERT_SAMPLE, rows)

    def samples(self, resolution: int, since: float) -> list[tuple[int, SwarmSample]]:
        """Return samples with the times at which they begin, oldest first."""
        rows = self._read(
            f"SELECT time, {', '.join(_VALUES)} FROM samples WHERE resolution = ? AND time >= ? ORDER BY time",
            (resolution, since),
        )
        return [(time, SwarmSample(*values)) for time, *values in rows]

    def save_tallies(self, tallies: Iterable[Tally]) -> None:
        rows = [
            (
                tally.model,
                tally.peer_id,
                tally.num_blocks,
                *astuple(tally.total),
                tally.last.process,
                *astuple(tally.last.work),
                tally.last.time,
                tally.since,
            )
            for tally in tallies
        ]
        with self._writing() as connection:
            connection.executemany(f"INSERT OR REPLACE INTO tallies VALUES ({', '.join('?' * 14)})", rows)

    def tallies(self) -> dict[Key, Tally]:
        found = {}
        for model, peer_id, num_blocks, *numbers, since in self._read("SELECT * FROM tallies"):
            last = Reading(numbers[4], WorkTotals(*numbers[5:9]), numbers[9])
            found[model, peer_id] = Tally(model, peer_id, num_blocks, WorkTotals(*numbers[:4]), last, since)
        return found

    def prune(self, time: float) -> None:
        """Delete expired samples and events, and the tallies of the servers not seen for longest."""
        with self._writing() as connection:
            for resolution, kept_s in KEPT_S.items():
                oldest = time - kept_s
                connection.execute("DELETE FROM samples WHERE resolution = ? AND time < ?", (resolution, oldest))
            connection.execute("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (MOST_EVENTS,))
            connection.execute(
                "DELETE FROM tallies WHERE (model, peer_id) IN "
                "(SELECT model, peer_id FROM tallies ORDER BY last_time DESC LIMIT -1 OFFSET ?)",
                (MOST_TALLIES,),
            )

    def _prepare(self, last_event_id: int) -> None:
        execute = self._connection.execute
        self._check()
        if self.path is not None:
            self._use_wal()
            execute("PRAGMA synchronous = NORMAL")  # in WAL mode, a power failure only loses the last transactions
        with self._writing():
            if self._check():  # another process may have been faster
                for statement in _SCHEMA.split(";"):
                    execute(statement)
                # Readers remember the last id, so ids go on where those of another history ended.
                execute("INSERT INTO sqlite_sequence VALUES ('events', ?)", (last_event_id,))
        if execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("database disk image is malformed")

    def _use_wal(self) -> None:
        """Switch to WAL mode with retries: SQLite does not wait for another process that switches a new file."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            else:
                return

    def _check(self) -> bool:
        """Return whether the file is new. Raise ValueError if it is another database or version."""
        (num_tables,), (application,), (version,) = (
            self._connection.execute(statement).fetchone()
            for statement in ("SELECT count(*) FROM sqlite_master", "PRAGMA application_id", "PRAGMA user_version")
        )
        if num_tables and application != APPLICATION_ID:
            raise ValueError(f"{self.path} is another database: expected a history that `serve` has written")
        if num_tables and version != SCHEMA_VERSION:
            raise ValueError(f"{self.path} is a history of version {version}: expected {SCHEMA_VERSION}")
        return not num_tables

    def _read(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            # A transaction that begins as a reader could not wait for another process when it writes.
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or after an error rolls back
                yield self._connection


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another process is writing, so that a retry may succeed."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
