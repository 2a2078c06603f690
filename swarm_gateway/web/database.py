"""A SQLite file of the gateway. A mark in its header distinguishes it from files of other programs."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any


class Database:
    """A database in one file, or in memory. All methods may be called by any thread."""

    def __init__(self, path: Path | None, application_id: int, tables: Iterable[str], purpose: str) -> None:
        """Open the file, or keep everything in memory without one. Only the user can read a new file.

        Args:
            application_id: the number in the file's header that says which program wrote it.
            purpose: the purpose of the file, for error messages: "… cannot be used for PURPOSE".

        Raises:
            ValueError: the file cannot be used.
        """
        self._lock = threading.RLock()
        try:
            if path is not None:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            # Without an isolation level, each statement is committed at once unless a transaction has begun.
            self._connection = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            if self.one("PRAGMA application_id")[0] != application_id:
                if self.one("SELECT COUNT(*) FROM sqlite_master")[0]:
                    raise ValueError(f"{path} is something else: expected a new file, or one that `serve` has written")
                self.run(f"PRAGMA application_id = {application_id}")
            for table in tables:
                self.run(table)
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{path} cannot be used for {purpose}: {reason}") from None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements of this context as one. None has an effect if one fails, or if the process ends before.

        Statements of other threads wait meanwhile. Transactions cannot be nested.
        """
        with self._lock, self._connection:  # the connection commits, or rolls back after an error
            self.run("BEGIN IMMEDIATE")
            yield

    def run(self, statement: str, *values: Any) -> None:
        self.all(statement, *values)

    def one(self, statement: str, *values: Any) -> Any:
        """Return the first row; None if there is none."""
        return next(iter(self.all(statement, *values)), None)

    def all(self, statement: str, *values: Any) -> list[Any]:
        with self._lock, closing(self._connection.execute(statement, values)) as cursor:
            return cursor.fetchall()

    def close(self) -> None:
        self._connection.close()


def owner_of(key: str) -> str:
    """Return the name of an API key in files, which do not contain the key."""
    return hashlib.sha256(key.encode()).hexdigest()
