"""Opens the file of the history, and replaces a damaged one."""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path

import platformdirs

from swarm_gateway.history.store import APPLICATION_ID, HistoryStore

_SQLITE, _ID_START, _ID_END = b"SQLite format 3\0", 68, 72  # the place of the application's id in the header
IN_MEMORY = "none"  # given instead of a file name
_logger = logging.getLogger(__name__)


def open_history(given: str | None, swarm: str) -> HistoryStore:
    """Open the history. ``given``: a file, or "none" for memory only; None: a file in the user's data directory.

    The default file has the swarm's name. A damaged history is renamed. A file that may be something else is left as it
    is. If the user's directory cannot be used, the history is kept in memory.

    Raises:
        ValueError: the given file cannot be used.
    """
    if given == IN_MEMORY:
        return HistoryStore(None)
    path = Path(given).expanduser() if given else platformdirs.user_data_path("swarm") / "history" / f"{swarm}.sqlite"
    try:
        return _open(path)
    except (OSError, sqlite3.Error, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{path} cannot be used for a history: {error}"
        if given:
            raise ValueError(f"{reason}; --history none keeps none") from None
        _logger.warning("%s; it is kept in memory", reason)
        return HistoryStore(None)


def _open(path: Path) -> HistoryStore:
    try:
        return HistoryStore(path)
    except sqlite3.DatabaseError as error:
        # Errors without a code come from ``quick_check``. Other codes, such as that of a full disk, mean no damage.
        if getattr(error, "sqlite_errorcode", None) not in (None, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise
        if not _was_history(path):
            raise ValueError(f"{path} is no history: expected a new file, or one that `serve` has written") from None
        aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
        path.rename(aside)
        for suffix in ("-wal", "-shm"):  # the log of the damaged file, not of the new one
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        _logger.warning("the history %s is damaged (%s): it was put aside as %s", path, error, aside.name)
        return HistoryStore(path)


def _was_history(path: Path) -> bool:
    """Return whether the file's header is a history's (SQLite, "Database File Format", 1.3)."""
    with path.open("rb") as file:
        header = file.read(_ID_END)
    return header.startswith(_SQLITE) and header[_ID_START:] == APPLICATION_ID.to_bytes(4, "big")
